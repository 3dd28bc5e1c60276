"""`fodit tune`: measures this machine and tunes the shapes of a model."""

import argparse
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

from fodit.ops.communicator import Communicator
from fodit.parallel import nccl_options, world_size
from fodit.tune.clock import Clock
from fodit.tune.measure import measure, this_machine
from fodit.tune.operation import shared_kernels
from fodit.tune.planner import agreed_files
from fodit.tune.setting import PROFILES, Setting
from fodit.tune.shapes import Model, model
from fodit.tune.store import Plans, plans_path, profile_path
from fodit.tune.tuner import Tuner

DESCRIPTION = """Measure this machine (half a minute, remembered) and find the best plans for the products of a model.
Run it as you will run the model: torchrun --nproc-per-node 2 -m fodit tune --model zai-org/CogVideoX-5b"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a name on Hugging Face or the folder of a saved pipeline")
    parser.add_argument("--height", type=int, help="pixels (default: the model's)")
    parser.add_argument("--width", type=int, help="pixels (default: the model's)")
    parser.add_argument("--num-frames", type=int, help="frames (default: the model's)")
    parser.add_argument("--ulysses", type=int, help="ranks that share a sequence (default: all, or half with --cfg 2)")
    parser.add_argument("--cfg", type=int, choices=(1, 2), default=1, help="2: a rank for each pass of guidance")
    parser.add_argument("--tp", type=int, default=1, help="tune the products of that many tensor-parallel ranks, too")
    parser.add_argument("--profile", choices=PROFILES, default="nvlink", help="play another link (default: as it is)")
    parser.add_argument("--again", action="store_true", help="measure the machine even if that was done before")


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with a reason on stderr."""
    parser = argparse.ArgumentParser(prog="fodit tune", description=DESCRIPTION)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    ranks = world_size()
    try:
        degree = _check(given, ranks)
        wanted = model(given.model, given.height, given.width, given.num_frames, given.cfg)
        if degree > wanted.heads:
            raise ValueError(f"--ulysses {degree}: {given.model} has {wanted.heads} attention heads")
    except ValueError as error:
        print(f"fodit tune: {error}", file=sys.stderr)
        return 1
    setting = Setting(given.profile)
    parts = [list(range(first, first + degree)) for first in range(0, ranks, degree)]
    groups = [dist.new_group(part, backend="nccl", pg_options=nccl_options()) for part in parts]
    comm = Communicator(groups[setting.rank // degree], setting.device)
    _tune(setting, comm, wanted, given)
    setting.barrier()
    dist.destroy_process_group()
    return 0


def _check(given: argparse.Namespace, ranks: int) -> int:
    """Ranks that communicate with each other.

    Raises:
        ValueError: there is nothing to measure.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"it measures GPUs, but torch {torch.__version__} sees no CUDA device")
    if ranks < 2:
        raise ValueError(
            "it measures several ranks together: torchrun --nproc-per-node 2 -m fodit tune --model " + given.model
        )
    degree = given.ulysses or (given.tp if given.tp > 1 else ranks // given.cfg)
    if degree < 2 or degree * given.cfg != ranks or given.tp not in (1, degree):
        raise ValueError(
            f"cfg={given.cfg}, ulysses={given.ulysses or degree}, tp={given.tp} on {ranks} ranks: cfg times ulysses "
            "(or tp) must be the number of ranks, with at least 2 that communicate"
        )
    return degree


def _tune(setting: Setting, comm: Communicator, wanted: Model, given: argparse.Namespace) -> None:
    clock = Clock(setting.device, setting.control)
    machine = this_machine(setting.device, setting.control, comm.size, setting.compute_sms)
    setting.say(f"{machine}\n{wanted.name}: {wanted.tokens} tokens, {wanted.heads} heads, batch {wanted.batch}")
    profile, plans, notes = agreed_files(machine, setting.control)
    for note in notes:
        setting.say(f"note: {note}")
    if profile is None or given.again:
        profile, plans = measure(machine, comm, clock, setting.compute(), setting.say), Plans(machine)
        if setting.rank == 0:
            profile.save(profile_path(machine))
    else:
        setting.say(f"profile of {profile.taken}")
    kernels = shared_kernels(setting.device, setting.control)
    with setting.compute() if setting.sms else nullcontext():
        Tuner(profile, plans, comm, clock, kernels, setting.say).model(wanted, given.ulysses or comm.size, given.tp)
    setting.say(f"{clock.elapsed_s:.0f} s; stored in {plans_path(machine)}")
