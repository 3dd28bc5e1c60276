"""Where something is measured: the link profile, the stream, and what goes into the result's file."""

import datetime
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fodit.agreement import everyone
from fodit.ops.peers import uuid_of
from fodit.parallel import initialise, rank_device, world_size
from fodit.report import versions
from fodit.tune.clock import Clock

PROFILES = ("nvlink", "no-p2p", "consumer")
CONSUMER_SMS = 24
PROFILE_HELP = (
    "nvlink: the machine as it is, whatever its links are; no-p2p: NCCL through host memory; "
    f"consumer: no-p2p with {CONSUMER_SMS} SMs to compute with (default: nvlink)"
)


def check_gpus(ranks: int = 1) -> None:
    """Before a `Setting` is made: there is a GPU for every process.

    Raises:
        RuntimeError: there is not, or there are fewer processes than `ranks`. All processes of a machine raise it.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"it measures GPUs, but torch {torch.__version__} sees no CUDA device")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > gpus:
        raise RuntimeError(f"there are {processes} processes on this machine, but {gpus} GPU(s)")
    if world_size() < ranks:
        raise RuntimeError(f"it measures several processes together: start it with torchrun --nproc-per-node {ranks}")


class Setting:
    """One rank of a measurement under torchrun, in a link profile.

    nvlink: the machine as it is. no-p2p: NCCL through host memory, as on GeForce cards. consumer: that link, and
    compute on a green context of 24 SMs, about an RTX 4090 on an H200.

    Args:
        profile: one of `PROFILES`.
        sms: SMs of the compute stream; None takes the profile's.
        max_ctas: the most thread blocks that NCCL takes for a collective of fodit's; None leaves it to NCCL.
    """

    def __init__(self, profile: str, sms: int | None = None, max_ctas: int | None = None) -> None:
        if profile not in PROFILES:
            raise ValueError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
        if profile != "nvlink":
            os.environ["NCCL_P2P_DISABLE"] = "1"  # read by NCCL when its first communicator is made
        self.profile, self.max_ctas = profile, max_ctas
        self.device = rank_device("cuda")
        torch.cuda.set_device(self.device)
        self.sms = sms if sms is not None else (CONSUMER_SMS if profile == "consumer" else 0)
        self.control = initialise(self.device, timeout_s=600)
        self.rank = dist.get_rank() if self.control is not None else 0
        self.ranks = dist.get_world_size() if self.control is not None else 1
        self.gpus = len(set(everyone(self.control, uuid_of(self.device))))
        self._clock = Clock(self.device, self.control)
        self._context: Any = None
        self._commit = _commit()

    @property
    def compute_sms(self) -> int:
        """SMs that the compute stream has."""
        return self.sms or torch.cuda.get_device_properties(self.device).multi_processor_count

    @contextmanager
    def compute(self) -> Iterator[None]:
        """The profile's compute stream is current inside."""
        if not self.sms:
            yield
            return
        if self._context is None:
            from torch.cuda.green_contexts import GreenContext

            self._context = GreenContext.create(num_sms=self.sms, device_id=self.device.index)
        stream = self._context.Stream()
        with torch.cuda.stream(stream):
            yield
        torch.cuda.synchronize()

    def barrier(self) -> None:
        torch.cuda.synchronize()
        if self.control is not None:
            dist.barrier(self.control)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def time(self, work: Callable[[], Any], repeats: int = 10, warm_up: int = 3) -> float:
        """Median milliseconds of `work` on the current stream, all ranks starting together."""
        return self.compare([work], repeats, warm_up)[0]

    def compare(self, works: Sequence[Callable[[], Any]], repeats: int = 10, warm_up: int = 3) -> list[float]:
        """`time` of each, all in turn in every round: the device's clocks change within seconds."""
        return self._clock.own(works, repeats, warm_up)

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Of each time the longest on any rank, on all ranks."""
        return self._clock.slowest(times)

    def describe(self) -> dict[str, Any]:
        """Date, machine, profile, versions and commit."""
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpus": f"{self.gpus} x {torch.cuda.get_device_name(self.device)}",
            "ranks": self.ranks,
            "profile": self.profile,
            "compute_sms": self.compute_sms,
            "nccl_max_ctas": self.max_ctas,
            "versions": versions(),
            "commit": self._commit,
        }

    def save(self, path: str | None, results: dict[str, Any]) -> None:
        """Write the results of rank 0, with the description, as JSON."""
        if path is not None and self.rank == 0:
            Path(path).write_text(json.dumps({**self.describe(), **results}, indent=1) + "\n", encoding="utf-8")


def _commit() -> str | None:
    if named := os.environ.get("FODIT_COMMIT"):
        return named
    found = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return found.stdout.strip() or None
