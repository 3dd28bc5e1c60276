"""The `fodit` command.

`fodit doctor`, `fodit report FILE ...`, `fodit tune ...`, `fodit bench kernels|ops|step ...`, `fodit --version`.
"""

import argparse
import os
import sys

import fodit
from fodit.commandline import Parser

COLUMNS = """columns, for each denoising step of rank 0:
  wall           from the step's start to its end
  compute        wall without exposed
  communication  while at least one collective was under way, hidden or not
  exposed        while the device did nothing but wait for communication
  hidden         share of the communication beside which it computed
"across ranks" compares the ranks' median steps, and all else in which they differ."""


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="fodit", description="Video generation with communication hidden.")
    parser.add_argument("--version", action="version", version=f"fodit {fodit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what fodit finds on this machine, and what would not run as fast as it could")
    report = commands.add_parser(
        "report",
        help="print latency reports that a pipeline saved",
        epilog=COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("files", nargs="+", metavar="FILE", help="JSON files written by report.save()")
    summary = "measure this machine and find a model's best plans, under torchrun"
    commands.add_parser("tune", help=summary, add_help=False)
    commands.add_parser("bench", help="benchmarks: kernels, ops, step; several GPUs under torchrun", add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if rest and given.command not in ("tune", "bench"):  # these have parsers of their own
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    if given.command == "tune":
        from fodit.tune.command import main as run_tune

        return run_tune(rest)
    if given.command == "bench":
        from fodit.bench.__main__ import main as run_bench

        run_bench(rest)
        return 0
    try:
        if given.command == "report":
            failed = _print_reports(given.files)
        else:
            failed = 0
            print(fodit.doctor())
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough: fodit report FILE | head -3
        # Python flushes standard output once more as it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return failed


def _print_reports(files: list[str]) -> int:
    failed = 0
    for index, file in enumerate(files):
        try:
            text = str(fodit.Report.load(file))
        except (OSError, ValueError) as error:
            why = f"{file}: {error.strerror}" if isinstance(error, OSError) else error  # a ValueError names the file
            print(f"fodit report: {why}", file=sys.stderr)
            failed = 1
            continue
        print(f"{'' if index == 0 else chr(10)}{file}\n{text}")
    return failed
