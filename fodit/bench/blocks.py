"""How long the blocks of a transformer take, without what is before and after them.

A model shortened to a few layers spends a larger part of its step on embeddings, guidance and the scheduler than the
whole model does; its blocks take the same time.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

BORDERS = (("condition_embedder", "norm_out"), ("embedding_dropout", "norm_final"))  # of Wan, of CogVideoX


class BlockClock:
    """Times the blocks in every call of the transformers, while it is entered.

    Its hooks are on the module before the blocks and on the one after: hooks on blocks would change how fodit runs
    them. Compiled and sharded blocks are timed alike.

    Args:
        transformers: diffusers' or with the same modules; others are not timed.
    """

    def __init__(self, transformers: Sequence[Any]) -> None:
        self._transformers = transformers
        self._handles: list[RemovableHandle] = []
        self._marks: list[torch.cuda.Event] = []
        self._calls: list[int] = []  # so far, at the end of each step

    def __enter__(self) -> "BlockClock":
        for transformer in self._transformers:
            for before, after in BORDERS:
                if hasattr(transformer, before) and hasattr(transformer, after):
                    self._handles.append(getattr(transformer, before).register_forward_hook(self._mark))
                    self._handles.append(getattr(transformer, after).register_forward_pre_hook(self._mark))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _mark(self, *_: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def end_step(self) -> None:
        self._calls.append(len(self._marks) // 2)

    def seconds(self) -> list[float]:
        """Of all calls of each step but the first; nothing where no transformer is timed. Waits for the device."""
        if not self._marks:
            return []
        torch.cuda.synchronize()
        spans = [begin.elapsed_time(end) / 1e3 for begin, end in zip(self._marks[::2], self._marks[1::2], strict=True)]
        return [sum(spans[begin:end]) for begin, end in pairwise(self._calls)]
