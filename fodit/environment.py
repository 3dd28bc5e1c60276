"""Environment variables of fodit's that take one of a few words."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    words: tuple[str, ...]

    @property
    def value(self) -> str:
        """What is given, right or wrong; nothing if it is not set."""
        return os.environ.get(self.name, "")

    def wrong(self, value: str) -> str | None:
        """What is wrong with a value, as a sentence; None if nothing is."""
        return None if value in ("", *self.words) else f"{self.name}={value} is none of {', '.join(self.words)}"


EXCHANGE = Variable("FODIT_EXCHANGE", ("direct", "staged", "nccl"))
KERNEL = Variable("FODIT_KERNEL", ("ampere", "hopper", "torch"))
