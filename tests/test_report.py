"""The latency report: its numbers, its JSON, its table."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fodit.report import SCHEMA, Call, Model, Parallel, RankReport, Report, StepTime, versions
from fodit.timeline import COMMUNICATION, EXPOSED, Timeline

WARM_UP = StepTime(wall_s=9.0, communication_s=2.0, exposed_s=2.0)
STEPS = [
    WARM_UP,
    StepTime(wall_s=3.0, communication_s=1.0, exposed_s=0.25),
    StepTime(wall_s=3.5, communication_s=1.0, exposed_s=0.75),
    StepTime(wall_s=3.2, communication_s=1.0, exposed_s=0.5),
]


def rank_report(rank: int = 0, **changes: Any) -> RankReport:
    values: dict[str, Any] = {
        "rank": rank,
        "device": "NVIDIA H200",
        "text_encoding_s": 0.5,
        "decoding_s": 1.5,
        "peak_memory_bytes": 3 * 2**30,
        "steps": STEPS,
    }
    return RankReport(**{**values, **changes})


def make_report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "model": Model(pipeline="FoWanPipeline", name="Wan-AI/Wan2.1-T2V-14B-Diffusers", dtype="bfloat16"),
        "call": Call(height=480, width=832, num_frames=81, steps=4, guidance_passes=2),
        "parallel": Parallel(cfg=1, ulysses=2, world_size=2),
        "overlap": True,
        "total_s": 21.0,
        "ranks": [rank_report(0), rank_report(1)],
        "versions": {"fodit": "0.1.0", "torch": "2.13.0", "cuda": None},
        "plans": ["all_reduce: slabs 1-4-4-1, 8 SMs free; predicted 12.10 ms, serial 14.52 ms (shipped)"],
        "notes": ["blocks.0.attn1.to_q is a LoRA layer: its projection is not overlapped"],
    }
    return Report(**{**values, **changes})


def line(report: Report, start: str) -> list[str]:
    """The cells of the only printed line that starts so."""
    (found,) = [text for text in str(report).splitlines() if text.strip().startswith(start)]
    return found.strip().removeprefix(start).split()


# Numbers


def test_compute_is_wall_without_waiting() -> None:
    assert STEPS[1].compute_s == 2.75


@pytest.mark.parametrize(
    ("communication", "exposed", "share"),
    [(1.0, 0.25, 0.75), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (1.0, 1.5, 0.0), (0.0, 0.0, None)],
)
def test_hidden_share(communication: float, exposed: float, share: float | None) -> None:
    assert StepTime(wall_s=2.0, communication_s=communication, exposed_s=exposed).hidden_share == share


@pytest.mark.parametrize(
    ("walls", "median"),
    [([], None), ([9.0], 9.0), ([9.0, 3.0], 6.0), ([9.0, 3.0, 4.0], 3.5), ([9.0, 3.0, 3.5, 3.2], 3.2)],
)
def test_median_step_leaves_the_first_of_three_out(walls: list[float], median: float | None) -> None:
    steps = [StepTime(wall_s=wall, communication_s=0.0, exposed_s=0.0) for wall in walls]
    assert make_report(ranks=[rank_report(steps=steps)]).median_step_s == median


def test_a_step_lasts_as_long_as_on_its_slowest_rank() -> None:
    slow = [StepTime(wall_s=wall, communication_s=0.0, exposed_s=0.0) for wall in (1.0, 1.0, 5.0, 6.0)]
    report = make_report(ranks=[rank_report(0), rank_report(1, steps=slow)])
    assert report.median_step_s == 5.0  # of max(3.0, 1.0), max(3.5, 5.0), max(3.2, 6.0)


def test_hidden_share_of_a_report_is_rank_0s() -> None:
    idle = [StepTime(wall_s=1.0, communication_s=0.0, exposed_s=0.0)]
    assert make_report(ranks=[rank_report(0), rank_report(1, steps=idle)]).hidden_share == 0.5
    assert make_report(ranks=[rank_report(0, steps=idle)]).hidden_share is None
    assert make_report(ranks=[rank_report(0, steps=[])]).hidden_share is None


def test_a_report_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        make_report(ranks=[])


# Timeline


class Event:
    """A CUDA event as its timeline reads it, milliseconds after some moment."""

    def __init__(self, seconds: float) -> None:
        self.ms = seconds * 1e3

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


def one_step(
    monkeypatch: pytest.MonkeyPatch, mark: Callable[[float], Any], spans: list[tuple[str, float, float]]
) -> StepTime:
    """A step from 1 s to 9 s with these spans; marks are taken by `mark`."""
    timeline = Timeline(torch.device("cpu"))
    borders = iter([mark(1.0), mark(9.0)])
    monkeypatch.setattr(timeline, "mark", lambda: next(borders))
    timeline.begin_step()
    for kind, begin, end in spans:
        timeline.add(kind, mark(begin), [mark(end)])
    timeline.end_step()
    (step,) = timeline.steps()
    return step


@pytest.mark.parametrize("mark", [float, Event])
@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(2.0, 3.0), (4.0, 6.0)], 3.0),
        ([(2.0, 3.0), (3.0, 4.0)], 2.0),
        ([(2.0, 5.0), (3.0, 6.0), (4.0, 4.5)], 4.0),
        ([(4.0, 6.0), (2.0, 8.0), (2.0, 3.0)], 6.0),  # ended in another order than they began
        ([(2.0, 8.0)] * 4, 6.0),
        ([(0.5, 2.0), (8.0, 10.0), (9.5, 11.0)], 2.0),  # of the step's own time only
    ],
)
def test_what_overlaps_is_booked_once(
    monkeypatch: pytest.MonkeyPatch, mark: Any, spans: list[tuple[float, float]], seconds: float
) -> None:
    step = one_step(monkeypatch, mark, [(COMMUNICATION, *span) for span in spans])
    assert step == StepTime(wall_s=8.0, communication_s=seconds, exposed_s=0.0)


@pytest.mark.parametrize("mark", [float, Event])
def test_kinds_are_booked_side_by_side(monkeypatch: pytest.MonkeyPatch, mark: Any) -> None:
    spans = [(COMMUNICATION, 2.0, 5.0), (EXPOSED, 4.0, 5.0), (COMMUNICATION, 3.0, 6.0), (EXPOSED, 5.5, 6.0)]
    assert one_step(monkeypatch, mark, spans) == StepTime(wall_s=8.0, communication_s=4.0, exposed_s=1.5)


def test_thousands_of_spans_are_read_at_once() -> None:
    timeline = Timeline(torch.device("cpu"))
    timeline.begin_step()
    begin = time.perf_counter()
    for index in range(10_000):
        timeline.add(COMMUNICATION, begin + index, begin + index + 2)
    timeline.end_step()
    begin = time.perf_counter()
    (step,) = timeline.steps()
    assert time.perf_counter() - begin < 1
    assert 0 < step.communication_s <= step.wall_s


# JSON


def test_json_round_trip(tmp_path: Path) -> None:
    report = make_report()
    path = report.save(tmp_path / "report.json")
    assert path == tmp_path / "report.json"
    assert Report.load(path) == report


def test_json_is_the_documented_schema() -> None:
    data = json.loads(json.dumps(make_report().to_dict()))
    names = "schema model call parallel overlap total_s ranks versions plans notes created"
    assert list(data) == names.split()
    assert data["schema"] == SCHEMA
    assert data["parallel"] == {"cfg": 1, "ulysses": 2, "ring": 1, "tp": 1, "world_size": 2}
    rank_fields = {"rank", "device", "text_encoding_s", "decoding_s", "peak_memory_bytes", "steps"}
    assert data["ranks"][1].keys() == rank_fields
    step = {"wall_s": 3.0, "compute_s": 2.75, "communication_s": 1.0, "exposed_s": 0.25}
    assert data["ranks"][1]["steps"][1] == step


def paths(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every named field of the JSON stands, down to the fields of the last step."""
    if isinstance(data, dict):
        here = [(*prefix, name) for name in data]
        return here + [path for name in data for path in paths(data[name], (*prefix, name))]
    if isinstance(data, list) and data:
        return paths(data[-1], (*prefix, len(data) - 1))
    return []


OPTIONAL = {"schema", "compute_s", *make_report().versions}
REQUIRED = [path for path in paths(make_report().to_dict()) if path[-1] not in OPTIONAL]


@pytest.mark.parametrize("path", REQUIRED, ids=lambda path: ".".join(map(str, path)))
def test_a_missing_or_mistyped_field_is_named(path: tuple[Any, ...]) -> None:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]

    broken = copy.deepcopy(make_report().to_dict())
    parent = broken
    for part in path[:-1]:
        parent = parent[part]
    del parent[path[-1]]
    with pytest.raises(ValueError) as missing:
        Report.from_dict(broken)
    assert f"{name} is missing" in str(missing.value)

    parent[path[-1]] = None
    with pytest.raises(ValueError) as mistyped:
        Report.from_dict(broken)
    assert f"{name} is None, expected" in str(mistyped.value)


def test_there_are_fields_to_miss() -> None:
    assert ("ranks", 1, "steps", 3, "exposed_s") in REQUIRED
    assert ("model", "name") in REQUIRED


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, "1", None])
def test_another_schema_is_refused(schema: Any) -> None:
    data = {**make_report().to_dict(), "schema": schema}
    with pytest.raises(ValueError, match=rf"schema {schema!r}, this fodit reads schema {SCHEMA}"):
        Report.from_dict(data)


def test_a_flag_is_no_number_and_a_number_no_flag() -> None:
    with pytest.raises(ValueError, match="total_s is True, expected float"):
        Report.from_dict({**make_report().to_dict(), "total_s": True})
    with pytest.raises(ValueError, match="overlap is 1, expected bool"):
        Report.from_dict({**make_report().to_dict(), "overlap": 1})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("notes", [1], "the field notes[0] is 1, expected str"),
        ("plans", ["one", None], "the field plans[1] is None, expected str"),
        ("ranks", [None], "the field ranks[0] is None, expected dict"),
        ("versions", {"torch": 2.13}, "the field versions.torch is 2.13, expected str"),
    ],
)
def test_what_is_in_lists_and_versions_is_checked(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Report.from_dict({**make_report().to_dict(), field: value})


def test_whole_seconds_are_read() -> None:
    assert Report.from_dict({**make_report().to_dict(), "total_s": 21}).total_s == 21


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "other.json is not JSON: Expecting value"),
        (b"{", "other.json is not JSON: Expecting property name"),
        (b"\xff\xfe", "other.json is not JSON: 'utf-8' codec can't decode"),
        (b"[]", "other.json is not a report of fodit's"),
        (b"{}", "other.json is not a report of fodit's"),
        (b'{"schema": "https://json-schema.org/"}', "other.json is not a report of fodit's"),
        (b'{"schema": 2}', "other.json: the report has schema 2, this fodit reads schema 1"),
        (b'{"schema": 1, "model": []}', "other.json: the field model is []"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(says)):
        Report.load(path)


# Table


def test_the_table_says_what_ran_and_where_the_time_went() -> None:
    report = make_report(total_s=21.0)
    text = str(report)
    assert text.startswith("FoWanPipeline, Wan-AI/Wan2.1-T2V-14B-Diffusers, bfloat16\n480 x 832, 81 frames")
    assert "2 x NVIDIA H200, cfg 1, ulysses 2, ring 1, tp 1, overlap on" in text
    assert line(report, "total") == ["21.000", "s"]
    assert line(report, "text encoding") == ["0.500", "s", "2.4%"]
    assert line(report, "denoising") == ["18.700", "s", "89.0%"]
    assert line(report, "other") == ["0.300", "s", "1.4%"]
    assert line(report, "median step")[:2] == ["3.200", "s,"]
    assert "50% of the communication hidden" in text
    assert line(report, "step 2") == ["3.000", "2.750", "1.000", "0.250", "75%"]
    assert line(report, "median after step 1") == ["3.200", "2.700", "1.000", "0.500", "50%"]
    assert "plan: all_reduce: slabs 1-4-4-1, 8 SMs free" in text
    assert "note: blocks.0.attn1.to_q is a LoRA layer" in text
    assert "torch 2.13.0" in text
    assert "cuda" not in text  # absent: nothing to say


def test_short_steps_are_printed_in_milliseconds() -> None:
    report = make_report(ranks=[rank_report(steps=[StepTime(0.0125, 0.002, 0.001)])])
    assert line(report, "rank 0, ms")[0] == "wall"
    assert line(report, "step 1") == ["12.500", "11.500", "2.000", "1.000", "50%"]


def test_ranks_are_compared_where_they_differ() -> None:
    assert "across ranks" not in str(make_report())
    report = make_report(ranks=[rank_report(0), rank_report(1, peak_memory_bytes=2**30, decoding_s=0.0)])
    assert line(report, "across ranks") == ["min", "median", "max"]
    assert line(report, "peak memory, GiB") == ["1.000", "2.000", "3.000"]
    assert line(report, "decoding, s") == ["0.000", "0.750", "1.500"]
    assert "text encoding, s" not in str(report)


def test_peak_memory_is_always_shown() -> None:
    assert line(make_report(ranks=[rank_report()]), "peak memory") == ["3.000", "GiB"]
    alike, apart = make_report(), make_report(ranks=[rank_report(0), rank_report(1, peak_memory_bytes=5 * 2**30)])
    assert line(alike, "peak memory  ") == ["3.000", "GiB,", "the", "most", "of", "2", "ranks"]
    assert line(apart, "peak memory  ") == ["5.000", "GiB,", "the", "most", "of", "2", "ranks"]


def test_one_process_has_no_communication_to_hide() -> None:
    report = make_report(ranks=[rank_report(steps=[StepTime(2.0, 0.0, 0.0)])], parallel=Parallel())
    assert "s, no communication" in str(report)
    assert line(report, "step 1") == ["2.000", "2.000", "0.000", "0.000", "-"]


def test_many_steps_are_folded() -> None:
    report = make_report(ranks=[rank_report(steps=STEPS * 13)])
    shown = [text.split()[1] for text in str(report).splitlines() if text.startswith("step ")]
    assert shown == ["1", "2", "3", "4", "51", "52"]
    assert line(report, "46 more") == []


def test_no_steps_at_all() -> None:
    report = make_report(ranks=[rank_report(steps=[]), rank_report(1, steps=[])])
    assert line(report, "denoising") == ["0.000", "s", "0.0%"]
    assert "step 1" not in str(report)


def test_no_line_is_wider_than_100_columns() -> None:
    long = Model(pipeline="FoCogVideoXPipeline", name="/folder" * 30, dtype="bfloat16")
    steps = [StepTime(123456.789, 12345.678, 1234.567)] * 60
    ranks = [rank_report(n, device=f"NVIDIA GeForce RTX 4090 number {n}", steps=steps) for n in range(8)]
    names = {f"package-{n}": "1.2.3" for n in range(20)}
    report = make_report(model=long, ranks=ranks, versions=names, notes=["a long sentence " * 20])
    assert max(map(len, str(report).splitlines())) <= 100


# Versions


def test_versions() -> None:
    import torch

    found = versions()
    assert found.keys() == {"fodit", "python", "torch", "diffusers", "transformers", "cuda", "nccl"}
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert found["python"] == sys.version.split()[0]
    assert Report.from_dict(make_report(versions=found).to_dict()).versions == found


def test_a_report_is_read_without_torch() -> None:
    """The module itself imports nothing but the standard library."""
    module = Path(__file__).parents[1] / "fodit" / "report.py"
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('report', {str(module)!r})\n"
        "sys.modules['report'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
