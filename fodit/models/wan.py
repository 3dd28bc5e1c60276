"""Wan: self-attention over video tokens, with q and k normalised over all heads together."""

from itertools import chain
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.hooks import ModelHook
from torch import nn

from fodit.kernels import rows
from fodit.models.blocks import FusedWanBlock
from fodit.models.family import ModelFamily
from fodit.models.modules import refuse_ignored, with_weights
from fodit.models.sequence import GatherVideo, ShardedSequence, named_arguments
from fodit.models.ulysses import attend
from fodit.ops import GatheredRows


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
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is not None or attention_mask is not None:
            raise NotImplementedError("this processor is for self-attention without a mask")
        sums: list[GatheredRows] = []
        totals: list[torch.Tensor] = []

        def between(buffer: torch.Tensor) -> None:
            layout = self.sequence.layout(hidden_states.shape[0], hidden_states.dtype)
            places = tuple(chain.from_iterable(layout.projection_matrices))
            local = rows.squares_of_slabs(buffer, places, layout.local_tokens * layout.batch)
            local = local.view(layout.local_tokens, layout.batch, 2)
            sums.append(self.sequence.comm.gather_rows(local, tuple(b - a for a, b in layout.token_ranges)))

        def prepare(
            query: torch.Tensor, key: torch.Tensor, heads: tuple[int, int]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not totals:  # gathered sums are waited for after the first slab, which NCCL sent before them
                totals.append(sums[0].wait() if sums else rows.squares(query, key))
            return rows.arrive_rms(query, key, totals[0], (attn.norm_q, attn.norm_k), heads, rotary)

        refuse_ignored(nn.RMSNorm, {"norm_q": attn.norm_q, "norm_k": attn.norm_k})
        rotary = None if rotary_emb is None else (rotary_emb[0][0, :, 0], rotary_emb[1][0, :, 0])
        arrive = with_weights(prepare, attn.norm_q, attn.norm_k)
        (output,) = attend(attn, hidden_states, self.sequence, arrive, self._attention_backend, between)
        return output()


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
        self._sequence.begin(given["hidden_states"].shape[1])
        given["hidden_states"] = self._sequence.shard_video(given["hidden_states"])
        return (), given


FAMILY = ModelFamily(
    transformer=WanTransformer3DModel,
    processor=WanUlyssesProcessor,
    self_attentions=lambda transformer: [block.attn1 for block in transformer.blocks],
    fused_blocks=lambda transformer, _: [(block, FusedWanBlock()) for block in transformer.blocks],
    sequence_hooks=lambda transformer, sequence: [
        (transformer, ShardTimesteps(sequence)),
        (transformer.blocks[0], ShardVideo(sequence)),
        (transformer.proj_out, GatherVideo(sequence)),
    ],
    passes_in_one_call=False,
)
