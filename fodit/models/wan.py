"""Wan: self-attention over video tokens, with q and k normalised over all heads together."""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.hooks import ModelHook
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn

from fodit.models.family import ModelFamily
from fodit.models.sequence import GatherVideo, ShardedSequence, named_arguments, refuse_training
from fodit.models.ulysses import attend_groups, project_qkv
from fodit.ops import GatheredRows
from fodit.plan import UlyssesLayout


class WanUlyssesProcessor:
    """Self-attention processor over a sharded sequence. Takes and returns this rank's tokens.

    RMS normalisation over all heads would be a barrier before the exchange, since no rank has all heads afterwards.
    So raw q and k are exchanged, the row sums of their squares (two floats a token) are gathered on the side, and
    normalisation happens on arrival.
    """

    _attention_backend = None  # set by the model's set_attention_backend()

    def __init__(self, sequence: ShardedSequence) -> None:
        self.sequence = sequence

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is not None or attention_mask is not None:
            raise NotImplementedError("this processor is for self-attention without a mask")
        layout = self.sequence.layout(hidden_states.shape[0])
        sums: list[GatheredRows] = []

        def between(sent: torch.Tensor) -> None:
            local = squares_of_rows(sent, layout)
            sums.append(self.sequence.comm.gather_rows(local, tuple(b - a for a, b in layout.token_ranges)))

        rows = hidden_states.flatten(0, 1)
        arrivals = project_qkv(attn, rows, self.sequence, layout.projection_plan(), between)
        cos, sin = (table[0, :, 0] for table in rotary_emb) if rotary_emb is not None else (None, None)
        squares = None

        def prepare(raw: torch.Tensor, heads: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            nonlocal squares
            if squares is None:
                squares = sums[0].wait()  # after the first slab: both are needed, and came in this order
            query, key, value = raw.transpose(0, 1).unbind(2)
            query = _normalise(query, squares[..., 0], attn.norm_q, heads)
            key = _normalise(key, squares[..., 1], attn.norm_k, heads)
            if cos is not None:
                query = apply_rotary_emb(query, (cos, sin), sequence_dim=1)
                key = apply_rotary_emb(key, (cos, sin), sequence_dim=1)
            return query, key, value

        attended = attend_groups(arrivals, prepare, layout, self.sequence, self._attention_backend)
        return attn.to_out[1](attn.to_out[0](attended))


def squares_of_rows(sent: torch.Tensor, layout: UlyssesLayout) -> torch.Tensor:
    """Sums of squares of each token's q and k over all heads: [local tokens, batch, 2] in fp32, from the send buffer."""
    plan = layout.projection_plan()
    total = sent.new_zeros(layout.local_tokens, layout.batch, 2, dtype=torch.float32)
    for group, slab in enumerate(plan.slabs):
        parts = sent[slab.start : slab.stop].split(slab.send_sizes)
        for rank, part in enumerate(parts):
            width = layout.group_heads(rank, group) * layout.head_dim
            qk = part.view(layout.local_tokens, layout.batch, 3, width)[:, :, :2]
            total += qk.float().square().sum(dim=-1)
    return total


def _normalise(heads: torch.Tensor, squares: torch.Tensor, norm: nn.RMSNorm, which: tuple[int, int]) -> torch.Tensor:
    """`norm` on some heads [batch, token, head, dim], given the sums of squares over all heads [token, batch]."""
    dim = heads.shape[-1]
    eps = norm.eps if norm.eps is not None else torch.finfo(heads.dtype).eps
    scale = torch.rsqrt(squares / norm.normalized_shape[0] + eps).t()[..., None, None]
    result = heads.float() * scale
    if norm.weight is not None:
        result = result * norm.weight[which[0] * dim : which[1] * dim].view(-1, dim)
    return result.to(heads.dtype)


class ShardTimesteps(ModelHook):
    """On the transformer: a timestep per token (Wan2.2 TI2V) is sharded like the tokens."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        given = named_arguments(module, args, kwargs)
        if given["timestep"].ndim == 2:
            self._sequence.begin(given["timestep"].shape[1])
            given["timestep"] = self._sequence.shard_video(given["timestep"])
        return (), given


class ShardVideo(ModelHook):
    """On the first block: every rank goes on with its part of the sequence."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        given = named_arguments(module, args, kwargs)
        refuse_training(given["hidden_states"])
        self._sequence.begin(given["hidden_states"].shape[1])
        given["hidden_states"] = self._sequence.shard_video(given["hidden_states"])
        return (), given


FAMILY = ModelFamily(
    transformer=WanTransformer3DModel,
    processor=WanUlyssesProcessor,
    self_attentions=lambda transformer: [block.attn1 for block in transformer.blocks],
    sequence_hooks=lambda transformer, sequence: [
        (transformer, ShardTimesteps(sequence)),
        (transformer.blocks[0], ShardVideo(sequence)),
        (transformer.proj_out, GatherVideo(sequence)),
    ],
    passes_in_one_call=False,
)
