"""One rank of two on one GPU: milliseconds of a layer, with collectives that only last as long as a profile says.

    python benchmarks/played_link.py played_link.so --model Wan2.1-T2V-14B --layers 8 --link no-p2p

played_link.so is played_link.cu, built. A collective takes as many SMs as NCCL's blocks and the time that it takes
alone on the link; whatever it has to wait for (its slab, the ones ahead of it, an SM) is real, and so is the host.
What is received is this rank's own data, so results mean nothing. A second GPU's noise is missing: this shows what a
schedule can reach, and what is in its way, not what two GPUs do.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook

from fodit.bench.floor import layer_floor, layer_work
from fodit.bench.model import DTYPE, Model, make_model
from fodit.models import attach
from fodit.models.ulysses import HOOK
from fodit.ops.communicator import Communicator, Pending
from fodit.ops.ready import Ready, StreamReached
from fodit.parallel import ParallelConfig
from fodit.tune.planner import Planner
from fodit.tune.profile import Profile, shipped
from fodit.tune.setting import Setting

BLOCKS = {"nvlink": 16, "no-p2p": 4, "consumer": 4}  # of NCCL
WORD = 16  # bytes


class PlayedCommunicator(Communicator):
    """Rank 0 of two."""

    def __init__(self, device: torch.device, library: ctypes.CDLL, profile: Profile, blocks: int) -> None:
        super().__init__(None, device)
        self.compute_sms = profile.machine.compute_sms
        self.size, self.stream = 2, torch.cuda.Stream(device, priority=-1)
        self.planner = self.plans = Planner(profile)
        self._library, self._profile, self._blocks = library, profile, blocks

    def start(
        self,
        collective: Callable[..., Any],
        *tensors: torch.Tensor | list[torch.Tensor],
        ready: Ready | None = None,
        **kwargs: Any,
    ) -> Pending:
        assert self.stream is not None
        # The parts of an all-to-all come in lists; of the two ranks only the other one's is exchanged.
        received, sent = (one if isinstance(one, torch.Tensor) else one[1] for one in (tensors[0], tensors[-1]))
        gathers = "gather" in collective.__name__
        # A profile's sizes are those of whole inputs, with the part that this rank keeps.
        op, size = ("all_gather", received.nbytes) if gathers else ("all_to_all", 2 * sent.nbytes)
        ns, words = int(self._profile.alone[op](size) * 1e6), min(received.nbytes, sent.nbytes) // WORD
        ready = ready or StreamReached(self.device)
        ready.hold(self.stream)
        code = self._library.play_collective(
            ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_longlong(ns), self._blocks,
            ctypes.c_void_p(sent.data_ptr()), ctypes.c_void_p(received.data_ptr()), ctypes.c_longlong(words),
        )  # fmt: skip
        if code:
            raise RuntimeError(f"play_collective({ns} ns, {self._blocks} blocks) failed with CUDA error {code}")
        with torch.cuda.stream(self.stream):
            if gathers:  # a second rank's part, for no NaN to change what the GPU does
                received.view(-1)[sent.numel() : 2 * sent.numel()].copy_(sent.view(-1))
            done = torch.cuda.Event()
            done.record()
        return Pending(lambda: torch.cuda.current_stream(self.device).wait_event(done), (*tensors, ready))


class Mark(ModelHook):
    """On a block: an event when it starts."""

    def __init__(self, marks: list[torch.cuda.Event]) -> None:
        super().__init__()
        self._marks = marks

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()
        return args, kwargs


class Given(Exception):
    """The transformer was called; ends the pipeline's call."""


def arguments_of(model: Model) -> tuple[tuple, dict[str, Any]]:
    """What the pipeline calls its transformer with."""
    found: list[tuple[tuple, dict[str, Any]]] = []

    def keep(_module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise Given

    handle = model.plain.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model.plain(**model.call, generator=torch.Generator().manual_seed(0))
    except Given:
        pass
    finally:
        handle.remove()
    return found[0]


def layer_ms(forward: Callable[[], Any], marks: list[torch.cuda.Event], seconds: float) -> float:
    """Median of a layer, the first one left out, in the second half of the time."""
    taken: list[float] = []
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < seconds:
        marks.clear()
        with torch.no_grad():
            forward()
        torch.cuda.synchronize()
        if elapsed > seconds / 2:
            taken += [before.elapsed_time(after) for before, after in zip(marks[1:], marks[2:], strict=False)]
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="played_link.cu, built")
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, default=8, help="at least 3 (default: 8)")
    parser.add_argument("--link", choices=BLOCKS, default="no-p2p")
    parser.add_argument("--head-groups", help="relative sizes such as 1,3,3,1 (default: planned)")
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    setting = Setting(given.link)
    sizes = {"height": None, "width": None, "num_frames": None, "steps": 2}
    model = make_model(argparse.Namespace(model=given.model, layers=given.layers, **sizes), setting.device)
    transformer = model.plain.transformer
    args, kwargs = arguments_of(model)
    video = prod(size // patch for size, patch in zip(model.latent_size, model.patch, strict=True))
    text, batch = model.call["prompt_embeds"].shape[1], 1 if model.wan else 2

    profile = shipped()[f"h200-x2-{given.link}"]
    played = PlayedCommunicator(setting.device, ctypes.CDLL(str(given.library.resolve())), profile, BLOCKS[given.link])
    groups: Any = SimpleNamespace(
        parallel=ParallelConfig(cfg=1, ulysses=2), device=setting.device, size=2, rank=0, ulysses=played,
        cfg=Communicator(None, setting.device),
    )  # fmt: skip
    shares = tuple(int(share) for share in given.head_groups.split(",")) if given.head_groups else None
    attachment = attach(transformer, groups, head_groups=shares)
    marks: list[torch.cuda.Event] = []
    for block in transformer.blocks if model.wan else transformer.transformer_blocks:
        HookRegistry.check_if_exists_or_initialize(block).register_hook(Mark(marks), f"{HOOK}.Mark")
    with setting.compute():
        taken = layer_ms(lambda: transformer(*args, **kwargs), marks, given.seconds)
    attachment.detach()
    floor = layer_floor(setting, layer_work(transformer, batch, video, text, 2), DTYPE)
    print(f"{given.model}, {given.link} played: {taken:.2f} ms a layer")
    print(f"{taken / floor.alone:.3f} of the floor alone ({floor.alone:.2f} ms)")
    print(f"{taken / floor.sustained:.3f} of the sustained floor ({floor.sustained:.2f} ms)")
    for line in (*attachment.notes, *sorted(played.fallbacks), *played.plans.asked):
        print(line)


if __name__ == "__main__":
    main()
