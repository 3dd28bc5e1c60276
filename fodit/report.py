"""What a generation cost: time per denoising step, and where it went.

A pipeline leaves a :class:`Report` in ``pipe.report`` after each call. ``print(pipe.report)`` shows it as a
table, ``pipe.report.save("report.json")`` keeps it, ``Report.load("report.json")`` brings it back.

The JSON has the fields of the dataclasses below, by the same names and in the same nesting, and ``schema``
in front. All times are seconds, all sizes are bytes::

    {
      "schema": 1,
      "model": {"pipeline": "FoCogVideoXPipeline", "name": "zai-org/CogVideoX-5b", "dtype": "bfloat16"},
      "call": {"height": 480, "width": 720, "num_frames": 49, "steps": 50, "guidance_passes": 2},
      "parallel": {"cfg": 1, "ulysses": 2, "ring": 1, "tp": 1, "world_size": 2},
      "overlap": true, "total_s": 231.4,
      "ranks": [
        {"rank": 0, "device": "NVIDIA H200",
         "text_encoding_s": 0.8, "decoding_s": 4.9, "peak_memory_bytes": 25769803776,
         "steps": [{"wall_s": 4.5, "compute_s": 4.4, "communication_s": 1.2, "exposed_s": 0.1}, ...]}, ...
      ],
      "versions": {"fodit": "0.1.0", "python": "3.12.1", "torch": "2.13.0", "cuda": null, ...},
      "plans": ["all_reduce: slabs 1-4-4-1, 8 SMs free; predicted 12.10 ms, serial 14.52 ms (shipped)"],
      "notes": ["transformer.blocks.0.attn1.to_q is a LoRA layer: its projection is not overlapped"],
      "created": "2026-11-29T21:00:00+00:00"
    }
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any, TypeVar

T = TypeVar("T")
SCHEMA = 1
_TIMES = ("wall", "compute", "communication", "exposed")  # of a StepTime, with _s behind
_WIDTH = 100
_FOLD = 12  # a longer list of steps is printed as its first rows and its last


@dataclass(frozen=True)
class StepTime:
    """One denoising step on one rank.

    wall_s: from the step's start to its end, seconds.
    communication_s: while at least one collective was under way, seconds, hidden or not.
    exposed_s: while the compute stream did nothing but wait for communication, seconds.
    """

    wall_s: float
    communication_s: float
    exposed_s: float

    @property
    def compute_s(self) -> float:
        """The step without its waiting: ``wall_s - exposed_s``, seconds."""
        return self.wall_s - self.exposed_s

    @property
    def hidden_share(self) -> float | None:
        """Share of the communication that computation hid, 0 to 1; None if there was none.

        0, not less, where waiting for a slower rank took longer than the traffic itself.
        """
        return max(0.0, 1 - self.exposed_s / self.communication_s) if self.communication_s else None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured.

    rank: global rank.
    device: name of its device as the driver gives it, or ``"cpu"``.
    text_encoding_s, decoding_s: prompt to embeddings, and latents to frames (VAE), seconds; 0 if not done.
    peak_memory_bytes: the most device memory allocated during the call; on CPU the process's peak.
    steps: one :class:`StepTime` a denoising step, in order.
    """

    rank: int
    device: str
    text_encoding_s: float
    decoding_s: float
    peak_memory_bytes: int
    steps: list[StepTime]

    @property
    def median_step(self) -> StepTime | None:
        """Median of each time over the steps, without the warm-up step; None without steps."""
        steps = _warm(self.steps)
        if not steps:
            return None
        return StepTime(**{item.name: median(getattr(step, item.name) for step in steps) for item in fields(StepTime)})


@dataclass(frozen=True, kw_only=True)
class Model:
    """pipeline: class name. name: folder or hub id it was loaded from. dtype: of the transformer."""

    pipeline: str
    name: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """What was asked for: pixels, frames, denoising steps.

    guidance_passes: how often a step runs the transformer on the whole sample: 2 with classifier-free
    guidance, 1 without.
    """

    height: int
    width: int
    num_frames: int
    steps: int
    guidance_passes: int


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of parallelism; their product is ``world_size``, the number of ranks."""

    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    tp: int = 1
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """One pipeline call on all its ranks.

    model, call, parallel: see their classes.
    overlap: whether communication was to run beside computation.
    total_s: the whole call on rank 0, seconds.
    ranks: one :class:`RankReport` a rank, by rank.
    versions: name to version, None for what is absent; see :func:`versions`.
    plans: how exchanges go, and a line for each plan of the session: what was chosen, its times, those without overlap.
    notes: one sentence for each thing that was not done as asked: a fallback, a setting without effect.
    created: end of the call, ISO 8601 in UTC.
    """

    model: Model
    call: Call
    parallel: Parallel
    overlap: bool
    total_s: float
    ranks: list[RankReport]
    versions: dict[str, str | None]
    plans: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("a report needs at least one rank, got none")

    @property
    def median_step_s(self) -> float | None:
        """Median denoising step, seconds; a step lasts as long as on its slowest rank. None without a step.

        The first step warms caches up and is left out where there are three or more.
        """
        ranks = zip(*(rank.steps for rank in self.ranks), strict=False)
        walls = [max(step.wall_s for step in steps) for steps in ranks]
        return median(_warm(walls)) if walls else None

    @property
    def hidden_share(self) -> float | None:
        """Share of rank 0's communication that computation hid, 0 to 1; None if there was none."""
        step = self.ranks[0].median_step
        return step.hidden_share if step else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, numbers and strings: the JSON of the module's docstring."""
        data = {"schema": SCHEMA, **asdict(self)}
        for rank, into in zip(self.ranks, data["ranks"], strict=True):
            for step, step_data in zip(rank.steps, into["steps"], strict=True):
                step_data["compute_s"] = step.compute_s
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that :meth:`to_dict` described.

        ``compute_s`` follows from the other times and is not read. Raises ValueError for another schema, and
        for a field that is missing or of the wrong type, by its name.
        """
        source = _Reader(data)
        if (schema := source.data.get("schema")) != SCHEMA:
            wanted = f"this fodit reads schema {SCHEMA}: load it with the fodit that wrote it"
            raise ValueError(f"the report has schema {schema!r}, {wanted}")
        return cls(
            model=_flat(Model, source.child("model"), str),
            call=_flat(Call, source.child("call"), int),
            parallel=_flat(Parallel, source.child("parallel"), int),
            overlap=source.get("overlap", bool),
            total_s=source.get("total_s", float),
            ranks=[_rank(child) for child in source.children("ranks")],
            versions=_versions(source.child("versions")),
            plans=source.items("plans", str),
            notes=source.items("notes", str),
            created=source.get("created", str),
        )

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON to ``path``, whose folder must exist; returns the path."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read what :meth:`save` wrote. Raises ValueError, naming the file, if it is no such report."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if isinstance(data, dict) and isinstance(data.get("schema"), int):
                return cls.from_dict(data)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        raise ValueError(f"{path} is not a report of fodit's")

    def __str__(self) -> str:
        """The table, at most 100 columns wide."""
        return "\n".join(_table(self))


def versions() -> dict[str, str | None]:
    """Versions of what took part: fodit, python, torch, diffusers, transformers, cuda, nccl; None if absent.

    cuda and nccl are those torch was built with. Imports torch, touches no device.
    """
    import torch

    import fodit

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "fodit": fodit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _installed(name) for name in ("diffusers", "transformers")},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Reading


@dataclass(frozen=True)
class _Reader:
    """A JSON object and where it stands in the report, so that an error can name the field."""

    data: dict[str, Any]
    where: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.data, dict):
            raise ValueError(f"the report is {self.data!r:.40}, expected a JSON object")

    def get(self, name: str, kind: type) -> Any:
        if name not in self.data:
            raise ValueError(f"the field {self.where}{name} is missing")
        return _checked(self.data[name], kind, f"{self.where}{name}")

    def items(self, name: str, kind: type) -> list[Any]:
        values = self.get(name, list)
        return [_checked(value, kind, f"{self.where}{name}[{i}]") for i, value in enumerate(values)]

    def child(self, name: str) -> _Reader:
        return _Reader(self.get(name, dict), f"{self.where}{name}.")

    def children(self, name: str) -> list[_Reader]:
        return [_Reader(item, f"{self.where}{name}[{i}].") for i, item in enumerate(self.items(name, dict))]


def _checked(value: Any, kind: type, where: str) -> Any:
    """The value, if it is of ``kind``. ``where`` names it in the error."""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"the field {where} is {value!r:.40}, expected {kind.__name__}")
    return value


def _flat(cls: type, source: _Reader, kind: type) -> Any:
    """An instance of the dataclass ``cls``, all of whose fields are of ``kind``."""
    return cls(**{item.name: source.get(item.name, kind) for item in fields(cls)})


def _versions(source: _Reader) -> dict[str, str | None]:
    return {name: None if value is None else source.get(name, str) for name, value in source.data.items()}


def _rank(source: _Reader) -> RankReport:
    kinds = {"rank": int, "device": str, "text_encoding_s": float, "decoding_s": float, "peak_memory_bytes": int}
    steps = [_flat(StepTime, step, float) for step in source.children("steps")]
    return RankReport(**{name: source.get(name, kind) for name, kind in kinds.items()}, steps=steps)


def _warm(steps: list[T]) -> list[T]:
    """The steps without the first, which also compiles, allocates and connects, where enough are left."""
    return steps[1:] if len(steps) >= 3 else steps


# Printing


def _table(report: Report) -> Iterator[str]:
    walls = [step.wall_s for rank in report.ranks for step in rank.steps]
    unit, scale = ("s", 1.0) if max(walls, default=0.0) >= 1 else ("ms", 1e3)
    yield from _heading(report)
    yield ""
    yield from _where_it_went(report)
    if report.ranks[0].steps:
        yield ""
        yield from _steps(report.ranks[0], unit, scale)
    if rows := _differences(report.ranks, unit, scale):
        yield ""
        yield from _columns(["across ranks", "min", "median", "max"], rows)
    yield ""
    for title, lines in (("plan", report.plans), ("note", report.notes)):
        for line in lines:
            yield from wrap(line, _WIDTH, initial_indent=f"{title}: ", subsequent_indent="      ")
    known = [f"{name} {version}" for name, version in report.versions.items() if version]
    yield from wrap(", ".join(known), _WIDTH)


def _heading(report: Report) -> Iterator[str]:
    model, call, parallel = report.model, report.call, report.parallel
    yield from wrap(f"{model.pipeline}, {model.name}, {model.dtype}", _WIDTH)
    passes = f"{call.guidance_passes} guidance pass" + ("es" if call.guidance_passes != 1 else "")
    yield f"{call.height} x {call.width}, {call.num_frames} frames, {call.steps} steps of {passes}"
    parts = [f"{count} x {name}" for name, count in Counter(rank.device for rank in report.ranks).items()]
    parts += [f"{name} {getattr(parallel, name)}" for name in ("cfg", "ulysses", "ring", "tp")]
    parts += [f"overlap {'on' if report.overlap else 'off'}"]
    yield from wrap(", ".join(parts), _WIDTH)


def _where_it_went(report: Report) -> Iterator[str]:
    first = report.ranks[0]
    parts = {
        "text encoding": first.text_encoding_s,
        "denoising": sum(step.wall_s for step in first.steps),
        "decoding": first.decoding_s,
    }
    parts["other"] = max(0.0, report.total_s - sum(parts.values()))
    yield f"{'total':<16}{report.total_s:10.3f} s"
    for name, seconds in parts.items():
        share = seconds / report.total_s if report.total_s else 0.0
        yield f"  {name:<14}{seconds:10.3f} s{share:8.1%}"
    if report.median_step_s is not None:
        hidden = report.hidden_share
        what = "no communication" if hidden is None else f"{hidden:.0%} of the communication hidden"
        yield f"{'median step':<16}{report.median_step_s:10.3f} s, {what}"
    most = max(rank.peak_memory_bytes for rank in report.ranks) / 2**30
    of_all = f", the most of {len(report.ranks)} ranks" if len(report.ranks) > 1 else ""
    yield f"{'peak memory':<16}{most:10.3f} GiB{of_all}"


def _steps(rank: RankReport, unit: str, scale: float) -> list[str]:
    headings = [f"rank {rank.rank}, {unit}", *_TIMES, "hidden"]
    rows = [_step_row(f"step {index}", step, scale) for index, step in enumerate(rank.steps, 1)]
    if len(rows) > _FOLD:
        rows[4:-2] = [[f"{len(rows) - 6} more"]]
    if len(rank.steps) > 1 and rank.median_step:
        warm_up = " after step 1" if len(_warm(rank.steps)) < len(rank.steps) else ""
        rows += [_step_row(f"median{warm_up}", rank.median_step, scale)]
    return _columns(headings, rows)


def _step_row(label: str, step: StepTime, scale: float) -> list[str]:
    times = [f"{getattr(step, f'{name}_s') * scale:.3f}" for name in _TIMES]
    return [label, *times, "-" if step.hidden_share is None else f"{step.hidden_share:.0%}"]


def _differences(ranks: list[RankReport], unit: str, scale: float) -> list[list[str]]:
    """Rows of minimum, median and maximum over the ranks, of what is not the same on all."""
    steps = [rank.median_step for rank in ranks if rank.steps]
    quantities = {f"step, {name}, {unit}": [getattr(step, f"{name}_s") * scale for step in steps] for name in _TIMES}
    quantities |= {
        "text encoding, s": [rank.text_encoding_s for rank in ranks],
        "decoding, s": [rank.decoding_s for rank in ranks],
        "peak memory, GiB": [rank.peak_memory_bytes / 2**30 for rank in ranks],
    }
    shown = {name: [f"{of(values):.3f}" for of in (min, median, max)] for name, values in quantities.items() if values}
    return [[name, *row] for name, row in shown.items() if row[0] != row[2]]


def _columns(headings: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table: the first column flush left, the others flush right, each as wide as it needs."""
    table = [row + [""] * (len(headings) - len(row)) for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    template = f"{{:<{widths[0]}}}" + "".join(f"{{:>{width + 3}}}" for width in widths[1:])
    return [template.format(*row).rstrip() for row in table]
