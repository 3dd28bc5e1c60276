"""The latency report: its numbers, its JSON, its table."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fodit.report import SCHEMA, Call, Model, Parallel, RankReport, Report, StepTime, versions

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


def test_whole_seconds_are_read() -> None:
    assert Report.from_dict({**make_report().to_dict(), "total_s": 21}).total_s == 21


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1, "model": []}'])
def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json: "):
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
