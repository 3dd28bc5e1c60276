"""Self-attention over a sharded sequence: heads are exchanged in groups, and attended as they arrive.

    compute   [ qkv 0 | qkv 1 | ... ][ attention 0 ][ attention 1 ] ...      [ out projection ]
    comm              [ qkv 0 ][ qkv 1 ] ...        [ output 0 ]   [ output 1 ]

All ranks start their collectives in the same order: q, k, v of every group, then the output of every group.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from fodit.models.sequence import ShardedSequence
from fodit.ops import Arrivals, Pending, all_to_all_products, gemm_all_to_all
from fodit.plan import Plan, UlyssesLayout


def project_qkv(
    attn: nn.Module,
    rows: torch.Tensor,
    sequence: ShardedSequence,
    plan: Plan,
    between: Callable[[torch.Tensor], None] | None = None,
) -> Arrivals:
    """q, k and v of `rows` [batch * tokens, C], on their way to the ranks that attend them.

    Projections that are not plain Linears (LoRA adapters, quantised weights) run as modules, and only their results
    are exchanged: nothing of the product is hidden behind it.
    """
    projections = [attn.to_q, attn.to_k, attn.to_v]
    if all(is_plain_linear(one) for one in projections):
        weights, biases = [one.weight for one in projections], [one.bias for one in projections]
        return gemm_all_to_all(rows, weights, biases, comm=sequence.comm, plan=plan, between=between)
    return all_to_all_products([one(rows) for one in projections], comm=sequence.comm, plan=plan, between=between)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes `x @ weight.T + bias` with the weight as it lies there, and nothing else.

    Not so with adapters and quantised weights, nor where a hook brings the weight or watches the call (offloading).
    """
    hooked = hasattr(module, "_diffusers_hook") or hasattr(module, "_hf_hook")
    watched = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not (hooked or watched)


def attend_groups(
    arrivals: Arrivals,
    prepare: Callable[[torch.Tensor, tuple[int, int]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    layout: UlyssesLayout,
    sequence: ShardedSequence,
    backend: Any,
) -> torch.Tensor:
    """Attention of this rank's heads, group after group, and its result back on the ranks that hold the tokens.

    Args:
        arrivals: from `project_qkv`.
        prepare: turns raw [token, batch, 3, head, dim] of the given heads into q, k, v, each [batch, token, head, dim].
        backend: diffusers attention backend, None for the active one.

    Returns:
        [batch, local tokens, heads * dim].
    """
    comm, dim = sequence.comm, layout.head_dim
    returns: list[tuple[Pending | None, torch.Tensor]] = []
    for group in range(layout.groups):
        heads = layout.head_ranges[layout.rank][group]
        raw = arrivals.wait(group).view(layout.tokens, layout.batch, 3, heads[1] - heads[0], dim)
        attended = dispatch_attention_fn(*prepare(raw, heads), dropout_p=0.0, is_causal=False, backend=backend)
        sent = attended.to(raw.dtype).transpose(0, 1).contiguous().flatten()  # token-major; a view where batch is 1
        if comm.size == 1:
            returns.append((None, sent))
            continue
        send, recv = layout.return_sizes(group)
        received = sent.new_empty(sum(recv))
        sizes = {"output_split_sizes": list(recv), "input_split_sizes": list(send)}
        returns.append((comm.start(dist.all_to_all_single, received, sent, **sizes), received))

    result = arrivals.wait(0).new_empty(layout.batch, layout.local_tokens, layout.heads, dim)
    for group, (pending, received) in enumerate(returns):
        if pending is not None:
            pending.wait()
        _, sizes = layout.return_sizes(group)
        for rank, part in enumerate(received.split(sizes)):
            first, last = layout.head_ranges[rank][group]
            result[:, :, first:last] = part.view(-1, layout.batch, last - first, dim).transpose(0, 1)
    return result.flatten(2)
