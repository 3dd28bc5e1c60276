"""How the ranks divide the work, and the process groups for it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fodit.ops.communicator import Communicator
from fodit.ops.connect import connected
from fodit.timeline import Timeline

MOST_S = 1e9  # that a timeout may be long: clocks count nanoseconds in 64 bits
DIMENSIONS = ("cfg", "tp", "ring", "ulysses")  # of the device mesh, slowest first


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 1 on; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel degrees. Those left None are chosen from the world size.

    Args:
        cfg: 2 puts the conditional and the unconditional pass of guidance on different ranks, 1 does not.
        ulysses: ranks that share one sequence, each attending some of the heads. At most the number of heads.
        speeds: relative speeds of the ranks that share a sequence, in their order, for cards of different kinds: (2, 1)
            gives the first one two thirds of the tokens and of the heads. None takes them for equal. Without `ulysses`
            there are as many ranks to a sequence as speeds.
        ring, tp: ring attention and tensor parallelism; only 1 so far.
        timeout_s: seconds after which a rank that waits for another gives up. Loading counts too: allow for the
            slowest rank's disk.
        max_ctas: the most thread blocks that NCCL takes for a collective of fodit's; None leaves it to NCCL, which
            measured best or within 2 % of it.
    """

    cfg: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    tp: int | None = None
    timeout_s: float = 1800.0
    max_ctas: int | None = None
    speeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "max_ctas"):
            if getattr(self, name) is not None and not is_count(getattr(self, name)):
                raise ValueError(f"{name} must be a whole number >= 1 or None, got {getattr(self, name)!r}")
        if self.cfg not in (None, 1, 2):
            raise ValueError(f"cfg={self.cfg}: guidance has two passes, so cfg is 1 or 2")
        for name, title in (("ring", "ring attention"), ("tp", "tensor parallelism")):
            if getattr(self, name) not in (None, 1):
                raise ValueError(
                    f"{name}={getattr(self, name)}: {title} is not available yet; use cfg and ulysses, {name}=1"
                )
        if self.speeds is not None:
            speeds = self.speeds if isinstance(self.speeds, Sequence) else ()
            if not speeds or not all(map(is_count, speeds)):
                raise ValueError(
                    f"speeds must be whole numbers >= 1, one for each rank of a sequence, got {self.speeds!r}"
                )
            object.__setattr__(self, "speeds", tuple(speeds))  # a list is not hashable, plans must be
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s <= MOST_S:
            raise ValueError(f"timeout_s must be seconds above 0, at most {MOST_S:.0e}, got {self.timeout_s!r}")

    def resolve(self, world_size: int, heads: int, guided: bool = True) -> "ParallelConfig":
        """All degrees, chosen so that they multiply to `world_size`.

        Guidance comes first (cfg = 2 where the model makes two passes and the ranks divide by two), because its one
        exchange a step is nearly free; the rest is Ulysses.

        Args:
            world_size: number of ranks.
            heads: attention heads of the model, the most that Ulysses can divide.
            guided: whether the model makes two passes a step.

        Raises:
            ValueError: the degrees do not multiply to the world size, or there are fewer heads than Ulysses ranks.
        """
        cfg, ulysses = self.cfg, self.ulysses
        if ulysses is None and self.speeds is not None:
            ulysses = len(self.speeds)
        if cfg is None:
            left = world_size // ulysses if ulysses and world_size % ulysses == 0 else world_size
            cfg = 2 if guided and left % 2 == 0 and (ulysses is None or left == 2) else 1
        if ulysses is None:
            ulysses = world_size // cfg if world_size % cfg == 0 else 1
        chosen = replace(self, cfg=cfg, ulysses=ulysses, ring=self.ring or 1, tp=self.tp or 1)
        fits = _combinations(world_size, heads)
        if prod(chosen.degrees) != world_size:
            raise ValueError(
                f"{chosen} uses cfg x ulysses = {cfg} x {ulysses} = {prod(chosen.degrees)} ranks, but there "
                f"{'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}. What fits: {fits}"
            )
        if self.speeds is not None and len(self.speeds) != ulysses:
            raise ValueError(f"{len(self.speeds)} speeds {self.speeds} for ulysses={ulysses}: give one for each rank")
        if ulysses > heads:
            raise ValueError(f"{chosen} divides {heads} attention heads by {ulysses} ranks. What fits: {fits}")
        return chosen

    @property
    def degrees(self) -> tuple[int, ...]:
        """In the order of `DIMENSIONS`; None counts as 1."""
        return tuple(getattr(self, name) or 1 for name in DIMENSIONS)

    def __str__(self) -> str:
        return "ParallelConfig(" + ", ".join(f"{n}={d}" for n, d in zip(DIMENSIONS, self.degrees, strict=True)) + ")"


def _combinations(world_size: int, heads: int) -> str:
    found = [
        f"cfg={cfg}, ulysses={world_size // cfg}"
        for cfg in (1, 2)
        if world_size % cfg == 0 and world_size // cfg <= heads
    ]
    most = f"a world size of at most {2 * heads}, for {heads} heads"
    return " or ".join(found) if found else most


def world_size() -> int:
    """Ranks of this run: of the initialised process group, or as the launcher announced them; 1 for plain python."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this rank: `device` if it has an index or is the CPU, else the GPU of the local rank.

    None takes a GPU where there is one, and the CPU otherwise.

    Raises:
        RuntimeError: CUDA was asked for and is absent, or there are fewer GPUs than local ranks.
    """
    wanted = torch.device(device) if device is not None else None
    if wanted is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type == "cpu":
        return wanted
    if wanted.type != "cuda":
        raise RuntimeError(f"device {wanted} is not supported: use cuda or cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device {wanted} was asked for, but torch {torch.__version__} sees no CUDA device; use device='cpu' or "
            "install a CUDA build of torch and check nvidia-smi"
        )
    count = torch.cuda.device_count()
    index = wanted.index if wanted.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise RuntimeError(
            f"rank {os.environ.get('RANK', '0')} wants cuda:{index}, but {count} GPU(s) are visible: start at most "
            f"{count} processes on this machine (torchrun --nproc-per-node {count})"
        )
    return torch.device("cuda", index)


def initialise(device: torch.device, timeout_s: float) -> dist.ProcessGroup | None:
    """Initialise torch.distributed from the launcher's environment, unless somebody has: NCCL for GPUs, gloo for CPUs.

    Returns:
        A gloo group of all ranks, for what is not data: agreements and errors. None for a single process, which needs
        no groups at all.
    """
    if world_size() == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    return dist.new_group(backend="gloo", timeout=timeout)


def nccl_options(max_ctas: int | None = None) -> Any:
    """For NCCL communicators whose collectives run beside products.

    On Hopper NCCL's thread blocks come in clusters of four, which need four free SMs of one GPC: beside a product that
    leaves a few SMs, collectives would wait for its end. Without clusters any free SM will do. (On two H200 with 4
    free SMs: all-reduce of 109 MB beside its product 4.1 ms without, 4.8 with clusters, through host memory.)
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.cga_cluster_size = 1
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


class ProcessGroups:
    """The groups of one pipeline. Several may live in one process.

    Args:
        parallel: resolved degrees. With more than one rank torch.distributed is initialised already.
        device: of this rank.
        timeline: where communication is booked.
        overlap: False waits for every collective at once.
        control: gloo group of all ranks, which make this together. With it ranks of one host exchange by copy engines.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        device: torch.device,
        timeline: Timeline | None = None,
        overlap: bool = True,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.parallel, self.device = parallel, device
        self.size = prod(parallel.degrees)
        if self.size > 1 and not dist.is_initialized():
            raise RuntimeError(f"{parallel} needs {self.size} ranks that know each other: call initialise() first")
        self.rank = dist.get_rank() if self.size > 1 else 0
        groups: dict[str, dist.ProcessGroup | None] = dict.fromkeys(DIMENSIONS)
        if self.size > 1:
            own: dict[Any, Any] = {}
            if device.type == "cuda":  # gloo has no such options
                used = [name for name in DIMENSIONS if getattr(parallel, name) != 1]
                own = {name: ("nccl", nccl_options(parallel.max_ctas)) for name in used}
            mesh = init_device_mesh(device.type, parallel.degrees, mesh_dim_names=DIMENSIONS, backend_override=own)
            groups = {name: mesh.get_group(name) for name in DIMENSIONS}
            for group in groups.values():
                _set_pg_timeout(timedelta(seconds=parallel.timeout_s), group)

        self._groups = list(groups.values())

        def group_of(name: str) -> dist.ProcessGroup | None:
            return groups[name] if getattr(parallel, name) != 1 else None

        self.cfg = Communicator(group_of("cfg"), device, timeline, overlap)
        self.ulysses = connected(group_of("ulysses"), device, control, parallel.timeout_s, timeline, overlap)

    def close(self) -> None:
        """Give up the groups: nothing runs on them any more. All ranks call this together."""
        if self.ulysses.copies is not None:
            self.ulysses.copies.close()
        for group in self._groups:
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups = []
