"""Conditions that streams wait for."""

from typing import Protocol

import torch


class Ready(Protocol):
    """A condition that a stream can wait for without a host thread and without an SM."""

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` do nothing further before the condition is met."""


class StreamReached:
    """The current stream has finished all that was enqueued on it when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device.index))  # a thread's current device may be another one

    def hold(self, stream: torch.cuda.Stream) -> None:
        if self._event is not None:
            stream.wait_event(self._event)
