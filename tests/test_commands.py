"""What `fodit tune`, `fodit bench` and the others say before they measure anything, and what `fodit.explain` says."""

import os
import re
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fodit import commandline
from fodit.bench import __main__ as bench
from fodit.bench import kernels
from fodit.kernels import gemm
from fodit.parallel import ParallelConfig
from fodit.tune import command, record, setting, store
from fodit.tune.explain import explain
from fodit.tune.profile import OPERATIONS, shipped
from fodit.tune.shapes import Model

ROOT = Path(__file__).parents[1]
MODEL = ("--model", "CogVideoX-5b")
NO_GPU = f"it measures GPUs, but torch {torch.__version__} sees no CUDA device"


@pytest.fixture
def played(monkeypatch):
    """Sets the number of GPUs and processes."""

    def machine(gpus, processes=1, rank=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name, number in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", processes)):
            monkeypatch.setenv(name, str(number))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setattr(commandline, "QUIET_S", 0.0)
        return monkeypatch

    return machine


def refused(capsys, main, *given):
    """The only line on stderr of a command that ends with status 1."""
    try:
        status = main(list(map(str, given)))
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr()
    assert status == 1 and shown.out == ""
    return shown.err


COMMANDS = (
    (bench.main, "fodit bench", ("step", *MODEL)),
    (bench.main, "fodit bench", ("ops",)),
    (bench.main, "fodit bench", ("kernels",)),
    (record.main, "python -m fodit.tune.record", ("never-made",)),
    (command.main, "fodit tune", MODEL),
)


@pytest.mark.parametrize(("main", "name", "given"), COMMANDS)
def test_without_a_gpu(played, capsys, main, name, given):
    played(0, 2)
    assert refused(capsys, main, *given) == f"{name}: {NO_GPU}\n"
    played(0, 2, rank=1)
    assert refused(capsys, main, *given) == "", "one rank tells it"
    assert not Path("never-made").exists()


@pytest.mark.parametrize(("main", "name", "given"), COMMANDS)
def test_more_processes_than_gpus(played, capsys, main, name, given):
    played(1, 2)
    assert refused(capsys, main, *given) == f"{name}: there are 2 processes on this machine, but 1 GPU(s)\n"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("step", "--model", "nonsense"), "no model nonsense; there are CogVideoX-2b, "),
        (("ops", "--ops", "nonsense"), "--ops nonsense: no operation nonsense; there are all_reduce, reduce_scatter"),
        (("ops", "--repeats", 0), "--repeats 0: at least 1"),
        (("ops", "--shapes", "1,2"), "--shapes 1,2: give M,N,K/M,N,K/... such as 17776,3072,6144"),
        (("ops", "--shapes", "a,b,c"), "--shapes a,b,c: give M,N,K"),
        (("kernels", "--shapes", "1,2"), "--shapes 1,2: give M,N,K"),
        (("kernels", "--seconds", 0), "--seconds 0.0: more than 0"),
        (("kernels", "--sms", -1), "--sms -1: at least 1"),
        (("kernels", "--max-ctas", 0), "--max-ctas 0: at least 1"),
    ],
)
def test_arguments_of_benchmarks(played, capsys, given, says):
    played(0)
    found = refused(capsys, bench.main, *given)
    assert found.startswith(f"fodit bench: {says}") and found.count("\n") == 1
    played(0, 2, rank=1)
    assert refused(capsys, bench.main, *given) == ""


@pytest.mark.parametrize(("main", "name", "given"), COMMANDS)
def test_one_rank_tells_of_mistakes_and_gives_help(capsys, monkeypatch, main, name, given):
    """The others wait, for torchrun ends all ranks when the first one ends in failure."""
    waits = []
    monkeypatch.setattr(commandline.time, "sleep", waits.append)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        for wrong, status in (("--nonsense", 2), ("--help", 0)):
            with pytest.raises(SystemExit) as end:
                main([*map(str, given), wrong])
            shown = capsys.readouterr()
            assert end.value.code == status
            assert ("usage" in shown.out + shown.err) == (rank == 0)
            assert not rank or shown.out + shown.err == ""
    assert waits == [commandline.QUIET_S]


def test_what_the_machine_must_have(played, capsys):
    for main, given in ((bench.main, ["ops"]), (record.main, ["never-made"])):
        played(2, 1)
        assert "start it with torchrun --nproc-per-node 2" in refused(capsys, main, *given)
    played(2, 2)
    assert "on 2 ranks M must be a multiple of 2 and N of 256" in refused(
        capsys, bench.main, "ops", "--shapes", "4,2,8"
    )
    assert "and N of 2\n" in refused(capsys, bench.main, "ops", "--ops", "all_reduce", "--shapes", "4,3,8")
    assert "--repeats 0" in refused(capsys, record.main, "never-made", "--repeats", 0)
    with patch.object(gemm, "kernels_for", lambda _: "they are not built"):
        assert refused(capsys, bench.main, "kernels") == "fodit bench: no kernels to measure: they are not built\n"
    known = torch.nn.Identity()
    known.name = "hopper_1"
    with patch.object(gemm, "kernels_for", lambda _: (known,)):
        assert "--names x: no such kernel; there are hopper_1" in refused(capsys, bench.main, "kernels", "--names", "x")
        assert kernels._kernels(torch.device("cpu"), "x|hopper") == [known]


def test_errors_of_a_measurement_keep_their_traceback(played):
    monkeypatch = played(1)
    monkeypatch.setattr(bench, "Setting", lambda *_: None)
    monkeypatch.setattr(bench.step, "run", lambda *_: int("broken"))
    with pytest.raises(ValueError, match="broken"):
        bench.main(["step", *MODEL])


# fodit tune


def test_model_is_looked_up_first(played, capsys, tmp_path):
    played(0)
    assert "is not a saved pipeline" in refused(capsys, command.main, "--model", tmp_path)
    played(0, 2, rank=1)
    assert refused(capsys, command.main, "--model", tmp_path) == ""


def tuned(monkeypatch, *given):
    """Number of ranks that are measured together, and the model, of a run that measures nothing."""
    seen = []
    monkeypatch.setattr(command, "Setting", lambda _: setting_of(int(os.environ["WORLD_SIZE"])))
    monkeypatch.setattr(command.dist, "new_group", lambda part, **_: part)
    monkeypatch.setattr(command.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(command, "nccl_options", lambda: None)
    monkeypatch.setattr(command, "connected", lambda group, *_: group)
    monkeypatch.setattr(command, "_tune", lambda _, comm, model, __: seen.append((len(comm), model)))
    assert command.main([*MODEL, *given]) == 0
    return seen[0]


def setting_of(ranks):
    played = setting.Setting.__new__(setting.Setting)
    played.rank, played.ranks, played.device, played.control = 0, ranks, torch.device("cpu"), None
    played.barrier = lambda: None
    return played


@pytest.mark.parametrize(
    ("ranks", "given", "cfg", "ulysses"),
    [
        (4, [], 2, 2),
        (8, [], 2, 4),
        (3, [], 1, 3),
        (2, ["--cfg", "1"], 1, 2),
        (4, ["--cfg", "1"], 1, 4),
        (4, ["--cfg", "2"], 2, 2),
        (2, ["--ulysses", "2"], 1, 2),
        (4, ["--ulysses", "4"], 1, 4),
        (2, ["--tp", "2"], 1, 2),
        (4, ["--tp", "2"], 2, 2),
        (4, ["--tp", "4", "--cfg", "1"], 1, 4),
    ],
)
def test_tunes_what_a_pipeline_runs(played, ranks, given, cfg, ulysses):
    monkeypatch = played(ranks, ranks)
    degree, model = tuned(monkeypatch, *given)
    assert degree == ulysses and isinstance(model, Model)
    assert model.batch == 2 // cfg, "with cfg=2 each pass of guidance has ranks of its own"
    if not given:
        chosen = ParallelConfig().resolve(ranks, model.heads)
        assert (chosen.cfg, chosen.ulysses) == (cfg, ulysses)


def test_nothing_to_tune(played, capsys):
    wanted = (
        "fodit tune: with 2 processes fodit runs cfg=2 x ulysses=1, which needs no plan; to tune Ulysses give --cfg 1, "
        "and run with ParallelConfig(cfg=1)\n"
    )
    for given in ([], ["--cfg", 2], ["--ulysses", 1]):
        played(2, 2)
        assert refused(capsys, command.main, *MODEL, *given) == wanted
    played(2, 2, rank=1)
    assert refused(capsys, command.main, *MODEL) == ""
    played(1)
    assert "torchrun --nproc-per-node 4 -m fodit tune --model CogVideoX-5b" in refused(capsys, command.main, *MODEL)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--cfg", 2], "uses cfg x ulysses = 2 x 1 = 2 ranks, but there are 3 ranks"),
        (["--ulysses", 0], "ulysses must be a whole number >= 1 or None, got 0"),
        (["--ulysses", 3, "--tp", 2], "--tp 2: 3 ranks communicate with each other; give --tp 1 or 3"),
        (["--tp", 0], "--tp 0: 3 ranks communicate"),
    ],
)
def test_degrees_that_do_not_fit(played, capsys, given, says):
    played(3, 3)
    assert says in refused(capsys, command.main, *MODEL, *given)


# Help


def shown_help(capsys, monkeypatch, main, *given):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*given, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_of_tune(capsys, monkeypatch):
    text = shown_help(capsys, monkeypatch, command.main)
    assert "    torchrun --nproc-per-node 4 -m fodit tune --model zai-org/CogVideoX-5b\n" in text, "to be copied"
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert words.count("needed for models that fodit does not know by name") == 3
    assert "discard its stored plans, also of other models" in words


def test_help_tells_what_the_profiles_are(capsys, monkeypatch):
    for main, *given in ((command.main,), (bench.main, "ops"), (record.main,)):
        words = " ".join(shown_help(capsys, monkeypatch, main, *given).split())
        assert "nvlink: the machine as it is, whatever its links are; no-p2p: NCCL through host memory;" in words
        assert "consumer: no-p2p with 24 SMs to compute with" in words


@pytest.mark.parametrize(("given", "status"), [((), 2), (("-h",), 0), (("--help",), 0), (("OUT", "--help"), 0)])
def test_usage_of_all_benchmarks(tmp_path, given, status):
    script = tmp_path / "benchmarks" / "run.sh"  # makes its folder, if it makes one, where it is found
    script.parent.mkdir()
    script.write_text((ROOT / "benchmarks" / "run.sh").read_text())
    done = subprocess.run(["bash", script, *given], capture_output=True, text=True, timeout=60)
    text, other = (done.stderr, done.stdout) if status else (done.stdout, done.stderr)
    assert (done.returncode, other) == (status, "") and list(tmp_path.iterdir()) == [script.parent]
    assert 'PROFILES=nvlink MODELS="CogVideoX-5b Wan2.1-T2V-1.3B" benchmarks/run.sh OUT' in text
    for word in [
        "checks",
        "kernels",
        "ops",
        "record",
        "steps",
        "LIMIT",
        "RANKS",
        "LAYERS",
        "WAYS",
        "PREDICT",
        "SHAPES",
    ]:
        assert re.search(rf"^  {word}  ", text, re.MULTILINE), word
    assert max(map(len, text.splitlines())) <= 80


# fodit.explain


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("nonsense", 1, 1, 1), "no operation 'nonsense'; there are all_reduce, reduce_scatter, all_to_all"),
        (("all_gather", 128, 128, 128), "there are all_reduce, reduce_scatter, all_to_all"),
        (("all_reduce", 0, 1, 1), "m, n and k must be at least 1, got 0, 1 and 1"),
        (("all_reduce", 1, 1, -1), "m, n and k must be at least 1"),
        (("all_to_all", 8888, 128, 64), "gives each of 2 ranks heads of 128 columns"),
    ],
)
def test_what_cannot_be_explained(given, says):
    with pytest.raises(ValueError, match=says):
        explain(*given, profile="h200-x2-no-p2p")


def test_explains_first_that_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FODIT_CACHE", str(tmp_path))
    note = "nothing is measured here: this is for 2 x NVIDIA H200, host memory"
    first, *rest = explain("all_to_all", 8888, 9216, 3072).splitlines()
    named = explain("all_to_all", 8888, 9216, 3072, profile="h200-x2-no-p2p")
    assert first == note and rest == named.splitlines()
    profile = shipped()["h200-x2-nvlink"]
    profile.save(store.profile_path(profile.machine))
    assert note not in explain("all_to_all", 8888, 9216, 3072)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_dtypes_that_no_product_has(dtype):
    with pytest.raises(ValueError, match=f"has dtype {dtype}; they have bfloat16, float16, float32"):
        explain("all_to_all", 8888, 9216, 3072, dtype=dtype, profile="h200-x2-no-p2p")


@pytest.mark.parametrize("profile", shipped())
@pytest.mark.parametrize("op", OPERATIONS)
def test_no_kernel_takes_float32(profile, op):
    def lines(dtype):
        return explain(op, 17776, 9216, 3072, dtype=dtype, profile=profile).splitlines()

    first, *rest = lines(torch.float32)
    assert first.startswith("float32 products run in torch, kernels take bfloat16, float16") and "16-bit" in first
    assert rest[0].endswith(", float32") and not re.search("hopper|ampere", "\n".join(rest))
    assert "16-bit" not in lines(torch.float16)[0]


@pytest.mark.parametrize("profile", shipped())
def test_predictions_are_not_below_the_bound(profile):
    # among them products that a kernel computes faster than cuBLAS, and slabs that are smaller than a sixteenth
    sizes = [(128, 128, 128), (512, 512, 512), (64, 256, 5120), (32760, 9216, 1024), (32760, 9216, 5120)]
    cases = [("all_reduce", *size) for size in sizes]
    # What of an all-to-all's product stays here hides the last slab.
    cases += [("all_to_all", *size) for size in ((8888, 9216, 3072), (16380, 15360, 5120), (8888, 5760, 1920))]
    for given in cases:
        text = explain(*given, profile=profile)
        predicted, bound = (
            float(re.search(rf"^  {name} +([\d.]+) ms", text, re.M)[1]) for name in ("predicted", "bound")
        )
        assert predicted >= bound, text
    assert "plan        serial" in explain("all_reduce", 128, 128, 128, profile="h200-x2-no-p2p")
