"""`fodit tune`: measures this machine and tunes the shapes of a model."""

import argparse
from contextlib import nullcontext

import torch.distributed as dist

from fodit.commandline import Parser, refuse
from fodit.ops.communicator import Communicator
from fodit.ops.connect import connected
from fodit.parallel import ParallelConfig, nccl_options, world_size
from fodit.tune.clock import Clock
from fodit.tune.measure import measure, this_machine
from fodit.tune.operation import shared_kernels
from fodit.tune.planner import agreed_files
from fodit.tune.setting import PROFILE_HELP, PROFILES, Setting, check_gpus
from fodit.tune.shapes import Model, model
from fodit.tune.store import Plans, plans_path, profile_path
from fodit.tune.tuner import Tuner

DESCRIPTION = """\
Measure this machine (half a minute, remembered), and find the best plans for
the products of a model. Run it with as many processes as the model will have:

    torchrun --nproc-per-node 4 -m fodit tune --model zai-org/CogVideoX-5b

They are divided as a pipeline divides them. Two processes run cfg=2, which
needs no plan; with --cfg 1 they share a sequence."""
SIZE_HELP = "(default: the model's; needed for models that fodit does not know by name)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a name on Hugging Face or the folder of a saved pipeline")
    parser.add_argument("--height", type=int, help=f"pixels {SIZE_HELP}")
    parser.add_argument("--width", type=int, help=f"pixels {SIZE_HELP}")
    parser.add_argument("--num-frames", type=int, help=f"frames {SIZE_HELP}")
    parser.add_argument("--ulysses", type=int, help="ranks that share a sequence (default: a pipeline's)")
    parser.add_argument(
        "--cfg", type=int, choices=(1, 2), help="2: each pass of guidance has ranks of its own (default: a pipeline's)"
    )
    parser.add_argument("--tp", type=int, default=1, help="tune the products of that many tensor-parallel ranks, too")
    parser.add_argument("--profile", choices=PROFILES, default="nvlink", help=PROFILE_HELP)
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure the machine even if that was done before, and discard its stored plans, also of other models",
    )


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with a reason on stderr."""
    parser = Parser(prog="fodit tune", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    call = (given.model, given.height, given.width, given.num_frames)
    try:
        cfg, degree = _degrees(given, model(*call).heads)
    except (ValueError, RuntimeError) as error:
        return refuse(parser.prog, error)
    setting = Setting(given.profile)
    parts = [list(range(first, first + degree)) for first in range(0, setting.ranks, degree)]
    groups = [dist.new_group(part, backend="nccl", pg_options=nccl_options()) for part in parts]
    comm = connected(groups[setting.rank // degree], setting.device, setting.control)
    _tune(setting, comm, model(*call, cfg), given)
    setting.barrier()
    dist.destroy_process_group()
    return 0


def _degrees(given: argparse.Namespace, heads: int) -> tuple[int, int]:
    """cfg, and ranks that communicate with each other, as a pipeline of a guided model chooses them.

    Raises:
        ValueError: there is nothing to measure.
        RuntimeError: there are no GPUs to measure.
    """
    check_gpus()
    ranks = world_size()
    if ranks < 2:
        raise ValueError(
            "it measures several processes together, as many as the model will have: "
            f"torchrun --nproc-per-node 4 -m fodit tune --model {given.model}"
        )
    wanted = given.ulysses
    if wanted is None and given.tp > 1:
        wanted = given.tp
    cfg, _, _, degree = ParallelConfig(cfg=given.cfg, ulysses=wanted).resolve(ranks, heads, guided=True).degrees
    if degree < 2:
        raise ValueError(
            f"with {ranks} processes fodit runs cfg={cfg} x ulysses={degree}, which needs no plan; "
            "to tune Ulysses give --cfg 1, and run with ParallelConfig(cfg=1)"
        )
    if given.tp not in (1, degree):
        raise ValueError(f"--tp {given.tp}: {degree} ranks communicate with each other; give --tp 1 or {degree}")
    return cfg, degree


def _tune(setting: Setting, comm: Communicator, wanted: Model, given: argparse.Namespace) -> None:
    clock = Clock(setting.device, setting.control)
    machine = this_machine(comm, setting.control, setting.compute_sms)
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
        Tuner(profile, plans, comm, clock, kernels, setting.say).model(wanted, comm.size, given.tp)
    setting.say(f"{clock.elapsed_s:.0f} s; stored in {plans_path(machine)}")
