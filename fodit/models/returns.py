"""Attention's output on its way back to the ranks that hold the tokens, and the out projection of it.

A product over all heads is the sum of the products over this rank's and over the others' heads. The first one needs
nothing that is still on its way, so where there is nothing else to compute it hides the last exchange::

    compute   [ attention, last group ][ out, own heads ][ out, others' heads ]
    comm                               [ output, last group ]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fodit.models.modules import why_called
from fodit.ops import Communicator, Pending
from fodit.plan import UlyssesLayout

WORDS = (torch.complex128, torch.int64)  # of 16 and of 8 bytes


@dataclass(frozen=True)
class Return:
    """The attention output of a head group.

    Args:
        pending: its exchange.
        attended: [tokens, batch, heads, head_dim], contiguous: all tokens, this rank's heads.
        received: flat, when the exchange has ended: one rank's block behind the other, [local tokens, batch, heads,
            head_dim] of its heads, nothing of this rank.
    """

    pending: Pending
    attended: torch.Tensor
    received: torch.Tensor


def project(
    projection: Any, returns: Sequence[Return], layout: UlyssesLayout, comm: Communicator, in_parts: bool
) -> torch.Tensor:
    """`projection(output)` of the attention output of all ranks' heads, [local tokens * batch, N].

    Args:
        projection: a Linear, or another module, which is called when all has arrived.
        comm: is told if the projection cannot hide the exchange.
        in_parts: this rank's heads first. Costs a few percent of the product; the sum over these heads is rounded to
            the output's type before the others' are added.
    """
    if in_parts:
        reason = why_called({"to_out": projection}, returns[0].attended.device.type)
        if reason is None:
            return _project_in_parts(projection, returns, layout)
        comm.fallbacks.add(f"projection not overlapped with its exchange: {reason}")
    output = _empty(returns, layout)
    _place_own(output, returns, layout)  # while the rest is on its way
    _place_others(output, returns, layout)
    return projection(output)


def _project_in_parts(projection: Any, returns: Sequence[Return], layout: UlyssesLayout) -> torch.Tensor:
    parts, weight = _parts(returns, layout), projection.weight
    first, last, own = next(parts)
    result = F.linear(own, weight[:, first:last], projection.bias)
    for first, last, others in parts:
        result.addmm_(others, weight[:, first:last].t())
    return result


def _parts(returns: Sequence[Return], layout: UlyssesLayout) -> Iterator[tuple[int, int, torch.Tensor]]:
    """First and last column of a part of the output, and these columns: this rank's, and the others' when here."""
    first, last = (head * layout.head_dim for head in layout.rank_heads(layout.rank))
    others = ((0, first), (last, layout.heads * layout.head_dim))
    if layout.returns_lie_ready:
        (one,), rows = returns, layout.local_tokens * layout.batch
        yield first, last, one.attended[slice(*layout.token_ranges[layout.rank])].view(rows, -1)
        one.pending.wait()
        yield *others[1 - layout.rank], one.received.view(rows, -1)
        return
    output = _empty(returns, layout)
    _place_own(output, returns, layout)
    yield first, last, output[:, first:last]
    _place_others(output, returns, layout)
    yield from ((start, stop, output[:, start:stop]) for start, stop in others if start < stop)


def _empty(returns: Sequence[Return], layout: UlyssesLayout) -> torch.Tensor:
    return returns[0].received.new_empty(layout.local_tokens * layout.batch, layout.heads * layout.head_dim)


def _place_own(output: torch.Tensor, returns: Sequence[Return], layout: UlyssesLayout) -> None:
    """What this rank attended for its own tokens."""
    mine = slice(*layout.token_ranges[layout.rank])
    for group, one in enumerate(returns):
        _place(output, one.attended[mine], layout, layout.rank, group)


def _place_others(output: torch.Tensor, returns: Sequence[Return], layout: UlyssesLayout) -> None:
    """What other ranks attended for these tokens, as it arrives."""
    for group, one in enumerate(returns):
        one.pending.wait()
        _, sizes = layout.return_sizes(group)
        for rank, part in enumerate(one.received.split(sizes)):
            if rank != layout.rank:
                _place(output, part, layout, rank, group)


def _place(output: torch.Tensor, part: torch.Tensor, layout: UlyssesLayout, rank: int, group: int) -> None:
    first, last = layout.head_ranges[rank][group]
    copy_rows(output[:, first * layout.head_dim : last * layout.head_dim], part.view(len(output), -1))


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in the longest words that fit: torch copies strided rows an element at a time."""
    for word in WORDS:
        if all(_fits(one, word.itemsize) for one in (target, source)):
            target, source = target.view(word), source.view(word)
            break
    target.copy_(source)


def _fits(tensor: torch.Tensor, size: int) -> bool:
    lengths = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(length * tensor.element_size() % size == 0 for length in lengths)
