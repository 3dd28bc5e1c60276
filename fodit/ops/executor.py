"""Computes the slabs of a plan and says when each one is ready to be sent."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from fodit.ops.communicator import Ready, StreamReached
from fodit.plan import Plan, Segment

Activation = Literal["none", "gelu-tanh"]


def stored(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's place in a flat buffer, as a [rows, cols] view."""
    return buffer.as_strided(
        (segment.rows, segment.cols), (segment.ld, 1), buffer.storage_offset() + segment.offset
    )


class TorchExecutor:
    """The reference: slab after slab, each segment by one torch call. Runs anywhere.

    Args:
        plan: what to compute.
        buffer: flat send buffer of `plan.send_size` elements.
        produce: writes one segment into the view it is given.
    """

    def __init__(self, plan: Plan, buffer: torch.Tensor, produce: Callable[[Segment, torch.Tensor], None]) -> None:
        self.plan, self.buffer, self._produce = plan, buffer, produce

    def fill(self, index: int) -> Ready:
        """Enqueue slab `index` on the current stream. Slabs are asked for in order."""
        for segment in self.plan.slabs[index].segments:
            self._produce(segment, stored(self.buffer, segment))
        return StreamReached(self.buffer.device)


def linear_segments(
    a: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], act: Activation
) -> Callable[[Segment, torch.Tensor], None]:
    """`act(a @ weight.T + bias)`, a segment at a time."""

    def produce(segment: Segment, out: torch.Tensor) -> None:
        rows = a[segment.row_start : segment.row_stop]
        weight = weights[segment.weight][segment.col_start : segment.col_stop].t()
        bias = biases[segment.weight]
        if bias is None:
            torch.mm(rows, weight, out=out)
        else:
            torch.addmm(bias[segment.col_start : segment.col_stop], rows, weight, out=out)
        if act == "gelu-tanh":
            out.copy_(F.gelu(out, approximate="tanh"))

    return produce


def copied_segments(products: Sequence[torch.Tensor]) -> Callable[[Segment, torch.Tensor], None]:
    """Products [rows, widths[i]] that were computed elsewhere, copied into place."""

    def produce(segment: Segment, out: torch.Tensor) -> None:
        out.copy_(
            products[segment.weight][
                segment.row_start : segment.row_stop, segment.col_start : segment.col_stop
            ]
        )

    return produce
