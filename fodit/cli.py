"""The `fodit` command: `fodit doctor`, `fodit tune ...`, `fodit report FILE ...`, `fodit bench ops|step ...`."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fodit", description="Video generation with communication hidden.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what fodit finds on this machine, and what would not run as fast as it could")
    report = commands.add_parser("report", help="print latency reports that a pipeline saved")
    report.add_argument("files", nargs="+", metavar="FILE", help="JSON files written by report.save()")
    summary = "measure this machine and find a model's best plans, under torchrun"
    commands.add_parser("tune", help=summary, add_help=False)
    commands.add_parser("bench", help="benchmarks, under torchrun", add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if rest and given.command not in ("tune", "bench"):  # these have parsers of their own
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    if given.command == "doctor":
        from fodit.doctor import doctor

        print(doctor())
    elif given.command == "report":
        return _print_reports(given.files)
    elif given.command == "tune":
        from fodit.tune.command import main as run_tune

        return run_tune(rest)
    else:
        from fodit.bench.__main__ import main as run_bench

        run_bench(rest)
    return 0


def _print_reports(files: list[str]) -> int:
    from fodit.report import Report

    failed = 0
    for index, file in enumerate(files):
        try:
            text = str(Report.load(file))
        except (OSError, ValueError) as error:
            print(f"fodit report: {error}", file=sys.stderr)
            failed = 1
            continue
        print(f"{'' if index == 0 else chr(10)}{file}\n{text}")
    return failed
