"""Self-attention over a sharded sequence: heads are exchanged in groups, and attended as they arrive.

    compute   [ qkv 0 | qkv 1 | ... ][ attention 0 ][ attention 1 ] ...      [ out, own heads ][ out, others' heads ]
    comm              [ qkv 0 ][ qkv 1 ] ...        [ output 0 ]   [ output 1 ]

All ranks start their collectives in the same order: q, k, v of every group, then the output of every group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from fodit.models.modules import why_called
from fodit.models.returns import Return, copy_rows, project
from fodit.models.sequence import ShardedSequence
from fodit.ops import Arrivals, Communicator, all_to_all_products, gemm_all_to_all
from fodit.plan import UlyssesLayout

# Normalises and rotates q and k [token, batch, head, dim] of the given range of heads; may overwrite them.
Prepare = Callable[[torch.Tensor, torch.Tensor, tuple[int, int]], tuple[torch.Tensor, torch.Tensor]]


def attend(
    attn: Any,
    hidden_states: torch.Tensor,
    sequence: ShardedSequence,
    prepare: Prepare,
    backend: Any,
    between: Callable[[torch.Tensor], None] | None = None,
    parts: int = 1,
    meanwhile: Callable[[], None] | None = None,
) -> list[Callable[[], torch.Tensor]]:
    """Self-attention of the whole sequence for this rank's tokens.

    With several parts of the batch the exchange of one hides behind the computation of another::

        compute   [ qkv, part 0 ][ qkv, part 1 ][ attention 0 ][ attention 1 ][ out 0, the caller's work ][ out 1 ] ...
        comm            [ qkv 0 ][ qkv 1 ]             [ output 0 ]  [ output 1 ]

    Args:
        attn: module with `to_q`, `to_k`, `to_v` and `to_out`.
        hidden_states: [batch, local tokens, C].
        prepare: what happens to q and k before they are attended.
        backend: diffusers attention backend, None for the active one.
        between: called with the buffer of the projections when all are under way, where there is an exchange.
        parts: equal parts of the batch that go one after the other.
        meanwhile: called when the first part's projections are under way; until then only that part of the
            `hidden_states` needs to be there.

    Returns:
        For each part a function that waits for it and gives [batch / parts, local tokens, C]; to be called in order.
    """
    if sequence.comm.size == 1:
        return [lambda: _attend_alone(attn, hidden_states, sequence, prepare, backend)]
    return _attend_shared(attn, hidden_states, sequence, prepare, backend, between, parts, meanwhile)


@torch.compiler.disable  # plans and streams are the host's business: nothing to trace
def _attend_shared(
    attn: Any,
    hidden_states: torch.Tensor,
    sequence: ShardedSequence,
    prepare: Prepare,
    backend: Any,
    between: Callable[[torch.Tensor], None] | None,
    parts: int,
    meanwhile: Callable[[], None] | None,
) -> list[Callable[[], torch.Tensor]]:
    layout = sequence.layout(hidden_states.shape[0], hidden_states.dtype, parts)
    arrivals = []
    for index, part in enumerate(hidden_states.chunk(parts)):
        arrivals.append(_project(attn, part.flatten(0, 1), sequence, layout, between))
        if index == 0 and meanwhile is not None:
            meanwhile()
    calls = sequence.attention_calls(layout)
    returns = [attend_groups(one, prepare, layout, calls, sequence.comm, backend) for one in arrivals]

    @torch.compiler.disable
    def output(returned: Sequence[Return]) -> torch.Tensor:
        projected = attn.to_out[1](project(attn.to_out[0], returned, layout, sequence.comm, parts == 1))
        return projected.view(layout.local_tokens, layout.batch, -1).transpose(0, 1)

    return [partial(output, one) for one in returns]


def _attend_alone(
    attn: Any, hidden_states: torch.Tensor, sequence: ShardedSequence, prepare: Prepare, backend: Any
) -> torch.Tensor:
    """Without an exchange there are no slabs, and the products lie as attention wants them."""
    shape = (sequence.heads, sequence.head_dim)
    query, key, value = (
        one(hidden_states).unflatten(-1, shape).transpose(0, 1) for one in (attn.to_q, attn.to_k, attn.to_v)
    )
    query, key = prepare(query, key, (0, sequence.heads))
    attended = _attention(query, key, value, backend)
    return attn.to_out[1](attn.to_out[0](attended.flatten(2)))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: Any) -> torch.Tensor:
    """[token, batch, head, dim] each → [batch, token, head, dim], in memory laid out as the query is."""
    operands = (one.transpose(0, 1) for one in (query, key, value))
    return dispatch_attention_fn(*operands, dropout_p=0.0, is_causal=False, backend=backend).to(query.dtype)


def _project(
    attn: Any,
    rows: torch.Tensor,
    sequence: ShardedSequence,
    layout: UlyssesLayout,
    between: Callable[[torch.Tensor], None] | None,
) -> Arrivals:
    """q, k and v of `rows` [batch * tokens, C], on their way to the ranks that attend them.

    Projections that are not plain Linears (LoRA adapters, quantised weights) run as modules, and only their results
    are exchanged: nothing of the product is hidden behind it.
    """
    named, plan = {name: getattr(attn, name) for name in ("to_q", "to_k", "to_v")}, layout.projection_plan
    projections, reason = named.values(), why_called(named, rows.device.type)
    if reason is None:
        weights, biases = [one.weight for one in projections], [one.bias for one in projections]
        return gemm_all_to_all(rows, weights, biases, comm=sequence.comm, plan=plan, between=between)
    sequence.comm.fallbacks.add(f"projection not overlapped with its exchange: {reason}")
    return all_to_all_products([one(rows) for one in projections], comm=sequence.comm, plan=plan, between=between)


def attend_groups(
    arrivals: Arrivals,
    prepare: Prepare,
    layout: UlyssesLayout,
    calls: Sequence[tuple[int, ...]],
    comm: Communicator,
    backend: Any,
) -> list[Return]:
    """Attention of this rank's heads, group after group, on its way back to the ranks that hold the tokens.

    `calls` are the heads of each call of attention in each group: some kernels let no collective in before they end.
    """
    dim = layout.head_dim
    returns = []
    for group in range(layout.groups):
        heads = layout.head_ranges[layout.rank][group]
        raw = arrivals.wait(group).view(layout.tokens, layout.batch, 3, heads[1] - heads[0], dim)
        query, key = prepare(raw[:, :, 0], raw[:, :, 1], heads)
        attended = _attended(query, key, raw[:, :, 2], calls[group], backend)
        send, recv = layout.return_sizes(group)
        received = comm.empty(sum(recv), attended)
        returns.append(Return(comm.all_to_all(received, attended.flatten(), recv, send), attended, received))
    return returns


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: tuple[int, ...], backend: Any
) -> torch.Tensor:
    """[token, batch, head, dim] each → the same, contiguous; in calls of so many heads."""
    if len(calls) == 1:
        return _attention(query, key, value, backend).transpose(0, 1).contiguous()  # a copy only in another layout
    result = query.new_empty(query.shape)
    for part, q, k, v in zip(*(one.split(calls, dim=2) for one in (result, query, key, value)), strict=True):
        copy_rows(part, _attention(q, k, v, backend).transpose(0, 1))
    return result


def joined(text: torch.Tensor, video: torch.Tensor) -> torch.Tensor:
    """[B, text, C] and [B, video, C] → [B, text + video, C], a view if they lie one behind the other."""
    if text.shape[1] == 0:
        return video
    if video.shape[1] == 0:
        return text
    follows = text.storage_offset() + text.shape[1] * text.stride(1) == video.storage_offset()
    shared = text.untyped_storage().data_ptr() == video.untyped_storage().data_ptr()
    if not (follows and shared and text.stride() == video.stride()):
        return torch.cat([text, video], dim=1)
    size = (text.shape[0], text.shape[1] + video.shape[1], text.shape[2])
    return text.as_strided(size, text.stride(), text.storage_offset())
