"""One pipeline's ranks: groups, attachments and the report of each call."""

import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from diffusers.utils.torch_utils import unwrap_module

from fodit.agreement import check_same, digest, everyone, fingerprint, spread_failure
from fodit.doctor import harmful_environment
from fodit.models import Attachment, attach
from fodit.models.sequence import HeadGroups
from fodit.parallel import DIMENSIONS, ParallelConfig, ProcessGroups
from fodit.pipelines.checkpoint import TRANSFORMERS
from fodit.report import Call, Model, Parallel, RankReport, Report, versions
from fodit.timeline import Timeline
from fodit.tune.planner import planner_for


class Session:
    """Holds what a pipeline needs on several ranks; made by `FoPipeline.parallelize()`.

    Args:
        parallel: resolved degrees.
        device: of this rank.
        control: gloo group of all ranks, None for one process.
        overlap: let communication run beside computation.
        output_rank: 0 if only rank 0 needs the frames, None for all.
        head_groups: of the exchange, see `fodit.models.attach`.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        device: torch.device,
        control: dist.ProcessGroup | None,
        overlap: bool,
        output_rank: int | None,
        head_groups: HeadGroups = None,
    ) -> None:
        self.device, self.control, self.overlap, self.output_rank = device, control, overlap, output_rank
        self.timeline = Timeline(device)
        self.groups = ProcessGroups(parallel, device, self.timeline, overlap, control)
        self.head_groups = head_groups
        self.plan()
        self.attachments: dict[str, Attachment] = {}
        self.warnings = harmful_environment() if device.type == "cuda" and self.groups.size > 1 else []
        for text in self.warnings:
            warnings.warn(text, stacklevel=3)
        self.report: Report | None = None
        self.size: tuple[int, int] = (0, 0)  # height and width of the running call
        self._calls = 0
        self._text_encoding_s = self._denoised_at = 0.0

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def holds_output(self) -> bool:
        return self.output_rank is None or self.rank == self.output_rank

    def plan(self, compute_sms: int | None = None) -> None:
        """Let what was measured or tuned on this machine, or a short probe of it, decide how operations run.

        Args:
            compute_sms: SMs that products may take; None takes all.
        """
        if compute_sms is not None:
            self.groups.ulysses.compute_sms = compute_sms
        if self.overlap:
            self.groups.ulysses.planner = planner_for(self.groups.ulysses, self.control, compute_sms)

    def attach(self, pipe: Any) -> None:
        """Attach to the pipeline's transformers, also to one that was exchanged since."""
        for name in TRANSFORMERS:
            # A compiled transformer is traced as it is attached: hooks and processors are the inner one's.
            transformer, present = getattr(pipe, name, None), self.attachments.get(name)
            transformer = unwrap_module(transformer) if transformer is not None else None
            if present is not None and (present.transformer is not transformer or not present.intact):
                self.attachments.pop(name).detach()
                present = None
            if transformer is not None and present is None:
                self.attachments[name] = attach(
                    transformer,
                    self.groups,
                    guided=lambda: pipe.guidance_scale > 1,
                    head_groups=self.head_groups,
                )

    def close(self) -> None:
        """Detach, and give up the groups: this is the session's end. All ranks call it together."""
        self.detach()
        self.groups.close()
        if self.control is not None:
            dist.destroy_process_group(self.control)

    def detach(self) -> None:
        for attachment in self.attachments.values():
            attachment.detach()
        self.attachments = {}

    @contextmanager
    def call(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Around one generation: the ranks agree on the arguments first, and fail together."""
        self._calls += 1
        stage = f"{self.control.group_name if self.control else ''}/{self._calls}"
        with spread_failure(self.control, self.rank, stage):
            check_same(self.control, "this call", arguments)
            self._mend_exchanges()
            for attachment in self.attachments.values():
                attachment.reset()
            for comm in (self.groups.cfg, self.groups.ulysses):
                comm.fallbacks.clear()
            self.timeline.clear()
            self._text_encoding_s = self._denoised_at = 0.0
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            copies = self.groups.ulysses.copies
            try:
                yield
                if copies is not None:
                    copies.check()
            except BaseException:
                if copies is not None:
                    copies.give_up()  # else the others wait for what this rank will not send
                raise

    def _mend_exchanges(self) -> None:
        """After a call that failed, if it did: all ranks start their exchanges anew."""
        copies = self.groups.ulysses.copies
        if not any(everyone(self.control, copies is not None and copies.broken)):
            return
        self.now()
        dist.barrier(self.control)
        if copies is not None:
            copies.reset()
        dist.barrier(self.control)

    def shared_generator(self) -> torch.Generator | None:
        """A generator with one seed on all ranks, drawn by rank 0; None for one process, as diffusers has it."""
        if self.control is None:
            return None
        seed = everyone(self.control, int(torch.randint(2**62, ())) if self.rank == 0 else None)[0]
        return torch.Generator("cpu").manual_seed(seed)

    def now(self) -> float:
        """Seconds, after all work of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def text_encoding(self) -> Iterator[None]:
        begin = self.now()
        yield
        self._text_encoding_s += self.now() - begin

    def denoised(self) -> None:
        """The last step has ended; what follows is decoding."""
        self._denoised_at = self.now()

    def finish(self, pipe: Any, arguments: dict[str, Any], num_frames: int, total_s: float) -> None:
        """Make the report of the call that has just ended, the same on all ranks."""
        decoded = arguments["output_type"] != "latent" and self.holds_output
        mine = RankReport(
            rank=self.rank,
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            text_encoding_s=self._text_encoding_s,
            decoding_s=self.now() - self._denoised_at if decoded else 0.0,
            peak_memory_bytes=self._peak_memory(),
            steps=self.timeline.steps(),
        )
        # Of two transformers each once: the ranks' groups are the same.
        notes = list(dict.fromkeys(note for attachment in self.attachments.values() for note in attachment.notes))
        planner = self.groups.ulysses.planner
        notes += [*self.warnings, *self.groups.ulysses.notes, *(planner.notes if planner is not None else ())]
        reports = everyone(self.control, (mine, total_s, notes))
        transformer = next(iter(self.attachments.values())).transformer
        parallel = dict(zip(DIMENSIONS, self.groups.parallel.degrees, strict=True))
        self.report = Report(
            model=Model(
                pipeline=type(pipe).__name__,
                name=str(pipe.config.get("_name_or_path") or type(transformer).__name__),
                dtype=str(transformer.dtype).removeprefix("torch."),
            ),
            call=Call(
                height=self.size[0],
                width=self.size[1],
                num_frames=num_frames,
                steps=len(mine.steps),
                guidance_passes=2 if arguments["guidance_scale"] > 1 else 1,
            ),
            parallel=Parallel(**parallel, world_size=self.groups.size),
            overlap=self.overlap,
            total_s=reports[0][1],
            ranks=[one for one, _, _ in reports],
            versions=versions(),
            plans=self._plans(),
            notes=list(dict.fromkeys(note for _, _, notes in reports for note in notes)),
        )

    def _plans(self) -> list[str]:
        """How ranks that share a sequence exchange, and what the planner chose."""
        comm = self.groups.ulysses
        chosen = list(comm.planner.asked) if comm.planner is not None else []
        return [f"exchanges: {comm.copies or 'NCCL'}", *chosen] if comm.stream is not None else chosen

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def components_digest(pipe: Any) -> dict[str, str]:
    """What must be the same on all ranks beside a call's arguments: the scheduler, and the transformers' modules with
    their adapters. Not the weights."""
    config = dict(getattr(pipe.scheduler, "config", {}))
    settings = {name: value for name, value in config.items() if not name.startswith("_")}  # nor diffusers' own notes
    found = {"scheduler": f"{type(pipe.scheduler).__name__} {digest(settings)}"}
    for name in TRANSFORMERS:
        if (transformer := getattr(pipe, name, None)) is not None:
            modules = unwrap_module(transformer).named_modules()
            parts = [(path, type(one).__qualname__, *_adapters(one)) for path, one in modules]
            found[f"{name} with its adapters"] = f"#{fingerprint(repr(parts).encode())}"
    return found


def _adapters(module: torch.nn.Module) -> tuple[str, ...]:
    """Of a layer of peft's: which are active, and by how much."""
    return tuple(str(getattr(module, name)) for name in ("active_adapters", "scaling") if hasattr(module, name))
