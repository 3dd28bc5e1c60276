"""Commands that torchrun starts once for each rank: one rank prints help, usage and errors."""

import argparse
import os
import sys
import time
from typing import Any

QUIET_S = 3.0  # the first rank to end in failure makes torchrun end the others: let the one speak before that


def speaks(variable: str = "RANK") -> bool:
    """Whether this process is the first of all, or with "LOCAL_RANK" the first of its machine."""
    return os.environ.get(variable, os.environ.get("RANK", "0")) == "0"


class Parser(argparse.ArgumentParser):
    """argparse's, quiet on all ranks but one."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if speaks():
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        if status and not speaks():
            time.sleep(QUIET_S)
        super().exit(status, message)


def refuse(command: str, error: Exception) -> int:
    """Say on stderr why a command does nothing, once for all ranks; its exit status."""
    # A RuntimeError is of this machine: others may have their GPUs.
    if speaks("LOCAL_RANK" if isinstance(error, RuntimeError) else "RANK"):
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
    else:
        time.sleep(QUIET_S)
    return 1
