"""The demo, called in this process: what it writes, and that a mistake is one line before anything is computed."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from fodit import Report
from fodit.testing import dummy

SMALL = ["--height", "32", "--width", "48", "--num-frames", "5", "--steps", "2", "--device", "cpu"]
DUMMY = ["--model", "CogVideoX-2b", "--dummy-weights"]
PROMPT = ["--prompt", "A boat"]

spec = importlib.util.spec_from_file_location("text_to_video", Path(__file__).parents[1] / "demos" / "text_to_video.py")
assert spec is not None and spec.loader is not None
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """One process in an empty folder, without the Hub."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the demo with these arguments; exit status, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["text_to_video.py", *arguments])
        try:
            demo.main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def no_weights(monkeypatch):
    """Loading or drawing weights is a failure."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were made first")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", refuse)
    monkeypatch.setattr(dummy, "pipeline", refuse)


def one_line(result, words):
    status, out, err = result
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("text_to_video: ") and words in err


def test_video_and_report(run, tiny):
    status, out, _ = run("--model", tiny("cogvideox-rope"), *PROMPT, *SMALL, "--report", "r.json")
    assert status == 0
    assert "video written to out.mp4" in out and "report written to r.json" in out
    assert Path("out.mp4").stat().st_size > 0
    report = Report.load("r.json")
    assert (report.call.height, report.call.num_frames, report.call.steps) == (32, 5, 2)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--steps", "few"], "argument --steps: invalid positive value: 'few'"),
        (["--num-frames", "0"], "argument --num-frames: must be at least 1, got 0"),
        (["--height", "65"], "argument --height: must be a multiple of 16, got 65"),
        (["--width", "-16"], "argument --width: must be at least 1, got -16"),
        (["--seed", str(2**64)], f"argument --seed: must be between -2**63 and 2**64 - 1, got {2**64}"),
        (["--seed", str(-(2**63) - 1)], f"argument --seed: must be between -2**63 and 2**64 - 1, got {-(2**63) - 1}"),
        (["--ulysses", "0"], "argument --ulysses: must be at least 1, got 0"),
        (["--cfg", "3"], "argument --cfg: invalid choice: 3"),
    ],
)
def test_numbers_that_no_model_takes(run, tiny, arguments, words):
    status, _, err = run("--model", tiny("cogvideox-rope"), *PROMPT, *arguments)
    assert status == 2
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1])
def test_seeds_that_generators_take(number):
    torch.Generator().manual_seed(demo.seed(str(number)))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--ulysses", "3"], "1 x 3 = 3 ranks, but there is 1 rank. What fits: cfg=1, ulysses=1"),
        (["--cfg", "2", "--ulysses", "2"], "2 x 2 = 4 ranks, but there is 1 rank"),
        (["--device", "cuda"], "sees no CUDA device"),
        (["--output", "nowhere/out.mp4"], "cannot write nowhere/out.mp4: there is no folder nowhere"),
        (["--output", "out.gif"], "cannot write a video to out.gif: its name must end in .mp4, .mov, .mkv"),
        (["--report", "nowhere/r.json"], "cannot write nowhere/r.json: there is no folder nowhere"),
        (["--report", ".."], "cannot write ..: it is a folder"),
        (["--report", "./out.mp4"], "--report ./out.mp4 would overwrite the video"),
        (["--fps", "0"], "fps is 0, expected a finite number above 0"),
        (["--fps", "-8"], "fps is -8, expected a finite number above 0"),
    ],
)
@pytest.mark.parametrize("weights", ["loaded", "dummy"])
def test_what_does_not_fit_is_one_line_before_any_weights(
    run, tiny, no_weights, monkeypatch, weights, arguments, words
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = DUMMY if weights == "dummy" else ["--model", tiny("cogvideox-rope"), *PROMPT]
    one_line(run(*model, *arguments), words)


def test_a_report_that_is_a_link_to_the_video(run, no_weights):
    Path("r.json").symlink_to("out.mp4")
    one_line(run(*DUMMY, "--device", "cpu", "--report", "r.json"), "--report r.json would overwrite the video")


def test_unknown_models(run, no_weights, tmp_path):
    one_line(run("--model", "wan3", "--dummy-weights"), "no configuration for 'wan3'; there are configurations for Cog")
    for name in ("nobody/nothing", "no/such/folder", str(tmp_path)):
        one_line(run("--model", name, *PROMPT), f"{name} is neither a saved pipeline's folder nor found on the Hub")


@pytest.mark.parametrize("index, kind", [('{"_class_name": "FluxPipeline"}', "FluxPipeline"), ("{}", "nameless")])
def test_other_pipelines(run, no_weights, tmp_path, index, kind):
    (tmp_path / "model_index.json").write_text(index)
    one_line(run("--model", str(tmp_path), *PROMPT), f"{tmp_path} is a {kind}")


def test_more_processes_than_gpus(run, no_weights, monkeypatch):
    """Rank 0, which speaks, has a GPU; the ranks without one would end in silence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    one_line(run(*DUMMY), "4 processes for 2 GPU(s) on this machine")


def test_other_ranks_fail_in_silence_and_later(run, no_weights, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    assert run(*DUMMY, "--output", "out.gif") == (1, "", "")
    assert len(waits) == 1


def test_only_the_first_machine_needs_the_folders(run, monkeypatch, no_weights):
    monkeypatch.setenv("GROUP_RANK", "1")
    with pytest.raises(AssertionError, match="weights were made first"):
        run(*DUMMY, "--device", "cpu", "--output", "nowhere/out.mp4")


def test_errors_of_generating_keep_their_traceback(run, monkeypatch):
    def fail(**call):
        raise ValueError("while generating")

    monkeypatch.setattr(demo, "make_pipeline", lambda *args: fail)
    with pytest.raises(ValueError, match="while generating"):
        run(*DUMMY, "--device", "cpu")


@pytest.mark.parametrize("rank, prompt, notes", [(0, PROMPT, 1), (1, PROMPT, 0), (0, [], 0)])
def test_a_prompt_beside_dummy_weights_is_said_to_be_ignored(run, monkeypatch, rank, prompt, notes):
    class Other:
        """A rank that does not hold the video."""

        frames = None

    monkeypatch.setattr(demo, "make_pipeline", lambda *args: lambda **call: Other())
    monkeypatch.setenv("RANK", str(rank))
    status, out, err = run(*DUMMY, "--device", "cpu", *prompt)
    assert (status, out.count("ignored"), out.count("\n"), err) == (0, notes, notes, "")
