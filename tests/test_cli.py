"""The `fodit` command."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_report import make_report

import fodit
from fodit.cli import main
from fodit.doctor import _exchanges, _measured_machines
from fodit.tune.profile import shipped


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.strip() == fodit.doctor()


def test_doctor_says_which_fodit_runs():
    assert f"package: {Path(fodit.__file__).parent}" in fodit.doctor().splitlines()


def test_doctor_advises_to_measure_what_was_not_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FODIT_CACHE", str(tmp_path / "none"))
    (first,) = _measured_machines(["GPU A", "GPU A"])
    assert first.startswith("plans: 0 measured machines in") and "until `fodit tune` has measured this one" in first

    monkeypatch.setenv("FODIT_CACHE", str(tmp_path))
    profile = next(iter(shipped().values()))
    for name, gpus in (("other", ("GPU B", "GPU B")), ("mixed", ("GPU A", "GPU B"))):
        machine = replace(profile.machine, gpus=gpus)
        replace(profile, machine=machine).save(tmp_path / f"{name}.profile.json")
    (tmp_path / "broken.profile.json").write_text('{"version": 1, "prof')
    first, *rest = _measured_machines(["GPU A", "GPU A"])
    assert first.startswith("plans: 2 measured machines in") and "`fodit tune`" in first
    assert "broken.profile.json cannot be read" in rest[0] and rest[0].startswith("warning: ")
    assert "1 x GPU A, 1 x GPU B" in rest[1] and "2 x GPU B" in rest[2]

    for names in (["GPU B", "GPU B"], ["GPU A", "GPU B"]):
        assert "`fodit tune`" not in _measured_machines(names)[0]


@pytest.mark.parametrize(
    ("name", "right", "says"),
    [
        ("FODIT_EXCHANGE", "staged", "is none of direct, staged, nccl: ranks refuse to connect"),
        ("FODIT_KERNEL", "ampere", "is none of ampere, hopper, torch: products run in torch"),
    ],
)
def test_doctor_names_values_that_fodit_does_not_take(monkeypatch, name, right, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv(name, "fast")
    assert f"warning: {name}=fast {says}" in fodit.doctor().splitlines()
    for value in (right, ""):
        monkeypatch.setenv(name, value)
        assert f"warning: {name}" not in fodit.doctor()


def test_doctor_promises_no_exchanges_with_a_wrong_variable(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")  # no GPU is asked
    monkeypatch.setenv("FODIT_EXCHANGE", "fast")
    assert "; no exchanges, because FODIT_EXCHANGE=fast is none of direct, staged, nccl" in _exchanges(2)


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert not done.value.code and capsys.readouterr().out == f"fodit {fodit.__version__}\n"


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fodit", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: fodit ") and "tune" in done.stdout
    assert "kernels, ops, step" in done.stdout


def test_report(tmp_path, capsys):
    report = make_report()
    files = [str(report.save(tmp_path / name)) for name in ("a.json", "b.json")]
    assert main(["report", *files]) == 0
    assert capsys.readouterr().out.count(str(report)) == 2


def test_report_of_other_files(tmp_path, capsys):
    report = make_report()
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty.json").write_text("")
    names = [str(tmp_path / name) for name in ("other.json", "empty.json", "none.json", "")]
    assert main(["report", *names, str(report.save(tmp_path / "a.json"))]) == 1
    shown = capsys.readouterr()
    other, empty, none, folder = shown.err.splitlines()
    assert other == f"fodit report: {names[0]} is not a report of fodit's"
    assert empty.startswith(f"fodit report: {names[1]} is not JSON: ")
    assert none == f"fodit report: {names[2]}: No such file or directory"
    assert folder == f"fodit report: {names[3]}: Is a directory"
    assert shown.out.strip() == f"{tmp_path / 'a.json'}\n{report}"


def test_report_help_explains_the_columns(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    shown = [text.split()[:1] for text in capsys.readouterr().out.splitlines()]
    assert all([name] in shown for name in ("wall", "compute", "communication", "exposed", "hidden"))


@pytest.mark.parametrize("command", ["report", "doctor"])
def test_a_reader_that_left_is_no_error(tmp_path, command):
    """As `fodit report FILE | head -3` has it, at its worst."""
    files = [str(make_report().save(tmp_path / "a.json"))] if command == "report" else []
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run([sys.executable, "-m", "fodit", command, *files], stdout=pipe, stderr=subprocess.PIPE)
    assert done.stderr == b""


def test_bench_help(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "step", "--help"])
    assert "--profile" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_without_a_gpu(capsys):
    with pytest.raises(SystemExit) as done:
        main(["bench", "ops"])
    assert done.value.code == 1 and "sees no CUDA device" in capsys.readouterr().err


def test_no_command(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "doctor" in capsys.readouterr().err
