"""What fodit adds to a diffusers pipeline: ranks, agreement between them, and the report."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from diffusers.utils.torch_utils import unwrap_module
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from fodit.agreement import check_same, in_turns, peers_present, together
from fodit.models.attachment import family_of
from fodit.models.sequence import HeadGroups, checked_head_groups
from fodit.parallel import ParallelConfig, initialise, rank_device, world_size
from fodit.pipelines.checkpoint import TRANSFORMERS, fewest_heads, loading_turns, with_dtype
from fodit.pipelines.session import Session, components_digest
from fodit.report import Report

Offload = Literal["model", "sequential"]


class FoPipeline(DiffusionPipeline):
    """Runs the diffusers pipeline it is mixed into on all ranks of a torchrun, or on one device in plain python.

    Everything is diffusers': arguments, schedulers, callbacks, LoRA, offloading. Every rank makes the same calls.
    Without a generator all ranks use the same noise, and all return the same frames.

    Attributes:
        report: `fodit.report.Report` of the last call, None before the first.
    """

    _session: Session | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *,
        parallel: ParallelConfig | None = None,
        overlap: bool = True,
        output_rank: int | None = None,
        device: str | torch.device | None = None,
        offload: Offload | None = None,
        head_groups: HeadGroups = None,
        **kwargs: Any,
    ) -> Any:
        """diffusers' `from_pretrained`, with the weights on this rank's device.

        Args:
            pretrained_model_name_or_path: hub id or local folder.
            parallel: parallel degrees; by default chosen from the world size.
            overlap: False waits for every communication at once, for comparison.
            output_rank: 0 decodes and returns frames on rank 0 only, the others return None; None on all ranks.
            device: "cpu" or "cuda"; by default the GPU of the local rank if there are any.
            offload: "model" or "sequential" keeps weights in host memory until they are used (diffusers'
                `enable_model_cpu_offload` and `enable_sequential_cpu_offload`).
            head_groups: parts in which attention heads are exchanged between ranks, a number or their relative sizes,
                such as (1, 3, 3, 1); None chooses.
            kwargs: diffusers' own arguments, such as `dtype`, which may be called `torch_dtype` in any version.

        Raises:
            ValueError, TypeError, OSError: arguments or files that do not fit, on every rank and before weights load
                where that can be known.
            RankError: another rank failed to load, or was given other arguments.
            RuntimeError: CUDA was asked for and is absent.
        """
        if kwargs.get("device_map") is not None:
            raise ValueError("device_map does not go with fodit, which places weights on each rank's device")
        kwargs = with_dtype(kwargs)
        parallel = parallel or ParallelConfig()
        same = {"overlap": overlap, "output_rank": output_rank, "offload": offload, "head_groups": head_groups}
        source = {"pretrained_model_name_or_path": str(pretrained_model_name_or_path)}
        placed, control = _enter("from_pretrained", parallel, device, {**source, **same, **kwargs})
        with together(control, "reading the checkpoint's configuration"):
            heads = fewest_heads(cls, pretrained_model_name_or_path, kwargs)
            parallel = _resolved(parallel, heads, head_groups)

        def load() -> Any:
            pipe = super(FoPipeline, cls).from_pretrained(pretrained_model_name_or_path, **kwargs)
            _place(pipe, placed, offload)
            return pipe

        leaves_host = placed.type == "cuda" and offload is None
        turns, mine = loading_turns(control, pretrained_model_name_or_path) if leaves_host else (1, 0)
        with _bars_on_rank_0():
            pipe = in_turns(control, turns, mine, "loading", load)
        pipe._session = Session(parallel, placed, control, overlap, output_rank, head_groups)
        return pipe

    def parallelize(
        self,
        parallel: ParallelConfig | None = None,
        *,
        overlap: bool = True,
        output_rank: int | None = None,
        device: str | torch.device | None = None,
        offload: Offload | None = None,
        head_groups: HeadGroups = None,
    ) -> "FoPipeline":
        """The same for a pipeline made from components: choose the degrees, place the weights. Returns the pipeline.

        `from_pretrained` has done it; a call does it with the defaults if nobody has. Arguments and errors as there.
        """
        parallel = parallel or ParallelConfig()
        same = {"overlap": overlap, "output_rank": output_rank, "offload": offload, "head_groups": head_groups}
        placed, control = _enter("parallelize", parallel, device, same)
        models = [unwrap_module(one) for name in TRANSFORMERS if (one := getattr(self, name, None)) is not None]
        for one in models:
            family_of(type(one))
        heads = min(one.config.num_attention_heads for one in models)
        parallel = _resolved(parallel, heads, head_groups)
        self.detach()
        with together(control, "placing the weights"):
            _place(self, placed, offload)
        self._session = Session(parallel, placed, control, overlap, output_rank, head_groups)
        return self

    def detach(self) -> None:
        """Give the transformers back as they were, for another pipeline. All ranks call this together.

        The weights stay where they are. A later call chooses the degrees anew; `parallelize` may do so before.
        """
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def report(self) -> Report | None:
        return self._session.report if self._session is not None else None

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """diffusers' `__call__`, with its arguments. With `output_rank=0` the frames are None on the other ranks.

        Raises:
            ValueError: a size the model refuses, on every rank.
            RankError: another rank failed, or was given other arguments.
        """
        if self._session is None:
            self.parallelize()
        session = self._session
        assert session is not None
        with together(session.control, "preparing this call"):
            bound = self._signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            arguments = {name: value for name, value in bound.arguments.items() if value is not self}
            session.attach(self)
        with session.call(arguments | components_digest(self)):
            begin = session.now()
            frames = arguments["num_frames"] if arguments["num_frames"] is not None else self._default_frames()
            if not isinstance(frames, int) or frames < 1:
                raise ValueError(f"num_frames must be a whole number >= 1, got {frames!r}")
            chosen = dict(arguments)
            if arguments["generator"] is None:
                chosen["generator"] = session.shared_generator()
            if not session.holds_output:
                chosen["output_type"] = "latent"  # no need to decode here
            output = self._plain_class.__call__(self, **chosen)
            session.finish(self, arguments, frames, session.now() - begin)
        if session.holds_output:
            return output
        return type(output)(frames=None) if not isinstance(output, tuple) else (None,)

    @property
    def _plain_class(self) -> type[DiffusionPipeline]:
        """diffusers' class that this one is mixed into."""
        mro = type(self).__mro__
        return next(cls for cls in mro[mro.index(FoPipeline) + 1 :] if "__call__" in vars(cls))

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._plain_class.__call__)

    def check_inputs(self, *args: Any, **kwargs: Any) -> None:
        """diffusers' checks, and those it leaves to a shape error later."""
        super().check_inputs(*args, **kwargs)
        given = inspect.signature(super().check_inputs).bind(*args, **kwargs).arguments
        if min(given["height"], given["width"]) < 1:
            raise ValueError(f"height and width must be at least 1, got {given['height']} x {given['width']}")
        self._check_size(given["height"], given["width"])
        if self._session is not None:
            self._session.size = (given["height"], given["width"])

    def _check_size(self, height: int, width: int) -> None:
        raise NotImplementedError

    def _default_frames(self) -> int:
        raise ValueError("num_frames must be given")

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        if self._session is None:
            return super().encode_prompt(*args, **kwargs)
        with self._session.text_encoding():
            return super().encode_prompt(*args, **kwargs)

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """diffusers' bar, on rank 0 only. Its ticks are the step borders of the report."""
        session = self._session
        if session is None:
            return super().progress_bar(iterable, total)
        config = getattr(self, "_progress_bar_config", {})
        if session.rank != 0:
            self._progress_bar_config = {**config, "disable": True}
        try:
            bar = super().progress_bar(iterable, total)
        finally:
            self._progress_bar_config = config
        return bar if total is None else _StepBar(bar, total, session)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """diffusers' own, written by rank 0 and under the name of diffusers' class, so that it loads there too."""
        session = self._session
        with together(session.control if session is not None else None, "saving"):
            if session is None or session.rank == 0:
                super().save_pretrained(save_directory, *args, **kwargs)
                index = Path(save_directory) / self.config_name
                content = json.loads(index.read_text(encoding="utf-8"))
                content["_class_name"] = self._plain_class.__name__
                index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def enable_model_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """diffusers' offloading, by default to this rank's GPU instead of the first one."""
        super().enable_model_cpu_offload(gpu_id, self._offload_target(gpu_id, device))

    def enable_sequential_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """diffusers' offloading, by default to this rank's GPU instead of the first one."""
        super().enable_sequential_cpu_offload(gpu_id, self._offload_target(gpu_id, device))

    def _offload_target(self, gpu_id: int | None, device: Any) -> Any:
        if gpu_id is None and device is None and self._session is not None:
            return self._session.device
        return device


class _StepBar:
    """A tqdm bar that also marks where steps begin and end."""

    def __init__(self, bar: Any, total: int, session: Session) -> None:
        self._bar, self._left, self._session = bar, total, session

    def __enter__(self) -> "_StepBar":
        self._bar.__enter__()
        self._session.timeline.begin_step()
        return self

    def update(self, n: int = 1) -> Any:
        self._left -= n
        if self._left > 0:
            self._session.timeline.begin_step()
        else:
            self._session.timeline.end_step()
        return self._bar.update(n)

    def __exit__(self, *error: Any) -> Any:
        self._session.denoised()
        return self._bar.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


@contextmanager
def _bars_on_rank_0() -> Iterator[None]:
    """transformers shows a bar for every model it loads, on every rank (diffusers' own bar knows ranks)."""
    quiet = dist.is_initialized() and dist.get_rank() != 0 and is_progress_bar_enabled()
    if quiet:
        disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bar()


def _enter(
    what: str, parallel: ParallelConfig, device: str | torch.device | None, options: dict[str, Any]
) -> tuple[torch.device, dist.ProcessGroup | None]:
    """Check the options and meet the other ranks, which must have been given the same.

    Returns:
        This rank's device, and the control group of all ranks.
    """
    if not isinstance(parallel, ParallelConfig):
        raise TypeError(f"parallel must be a fodit.ParallelConfig, such as ParallelConfig(cfg=2), got {parallel!r}")
    if not isinstance(options["overlap"], bool):
        raise TypeError(f"overlap must be True or False, got {options['overlap']!r}")
    output_rank, offload = options["output_rank"], options["offload"]
    if output_rank not in (None, 0):
        raise ValueError(f"output_rank must be 0 (frames on rank 0 only) or None (on all ranks), got {output_rank!r}")
    if offload not in (None, "model", "sequential"):
        raise ValueError(f"offload must be 'model', 'sequential' or None, got {offload!r}")
    placed = rank_device(device)
    control = initialise(placed, parallel.timeout_s)
    # repr, not str: a degree that is chosen differs from one that is given, whatever it is chosen to be.
    with peers_present(what):
        check_same(control, what, {"parallel": repr(parallel), **options})
    return placed, control


def _resolved(parallel: ParallelConfig, heads: int, head_groups: HeadGroups) -> ParallelConfig:
    """All degrees; raises ValueError if they, or the head groups, do not fit the heads."""
    resolved = parallel.resolve(world_size(), heads)
    checked_head_groups(head_groups, heads, resolved.ulysses or 1, resolved.speeds)
    return resolved


def _place(pipe: Any, device: torch.device, offload: Offload | None) -> None:
    if device.type == "cuda":
        check_fits(_weights_to_move(pipe, device), torch.cuda.mem_get_info(device)[0], device, offload)
    if offload is None:
        pipe.to(device)
    elif offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.enable_sequential_cpu_offload(device=device)


def _weights_to_move(pipe: Any, device: torch.device) -> dict[str, int]:
    """Bytes of each model's parameters that are not on the device yet."""
    models = {name: one for name, one in pipe.components.items() if isinstance(one, torch.nn.Module)}
    return {
        name: sum(weight.nbytes for weight in model.parameters() if weight.device != device)
        for name, model in models.items()
    }


def check_fits(weights: dict[str, int], free: int, device: torch.device, offload: Offload | None = None) -> None:
    """Raise MemoryError, saying what would work, if weights of these bytes by model do not fit into `free` bytes."""
    if not weights:
        return
    total, largest = sum(weights.values()), max(weights, key=lambda name: weights[name])
    need = {None: total, "model": weights[largest], "sequential": 0}
    if need[offload] <= free:
        return
    fitting = next(way for way, least in need.items() if least <= free)
    raise MemoryError(
        f"the weights take {total / 2**30:.1f} GiB and {device} has {free / 2**30:.1f} GiB free. The largest model is "
        f"{largest} with {weights[largest] / 2**30:.1f} GiB: offload={fitting!r} would fit it"
    )
