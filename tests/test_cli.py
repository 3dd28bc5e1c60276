"""The `fodit` command."""

import subprocess
import sys

import pytest
import torch
from test_report import make_report

import fodit
from fodit.cli import main


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.strip() == fodit.doctor()


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fodit", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: fodit ") and "tune" in done.stdout


def test_report(tmp_path, capsys):
    report = make_report()
    files = [str(report.save(tmp_path / name)) for name in ("a.json", "b.json")]
    assert main(["report", *files]) == 0
    assert capsys.readouterr().out.count(str(report)) == 2
    (tmp_path / "c.json").write_text("{}")
    assert main(["report", str(tmp_path / "c.json"), str(tmp_path / "none.json"), files[0]]) == 1
    shown = capsys.readouterr()
    assert "c.json: the report has schema None" in shown.err and "none.json" in shown.err and str(report) in shown.out


def test_bench_help(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "step", "--help"])
    assert "--profile" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_without_a_gpu():
    with pytest.raises(RuntimeError, match="sees no CUDA device"):
        main(["bench", "ops"])


def test_no_command(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "doctor" in capsys.readouterr().err
