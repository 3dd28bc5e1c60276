"""CogVideoX: text and video are one joint sequence, normalised per head and rotated over the video tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.hooks import ModelHook
from diffusers.models.attention_processor import Attention

from fodit.kernels import rows
from fodit.kernels.modulation import Rotary
from fodit.models.blocks import FusedBlock, FusedCogVideoXBlock, Later, Tail
from fodit.models.family import ModelFamily
from fodit.models.modules import refuse_ignored, with_weights
from fodit.models.sequence import GatherVideo, ShardedSequence, named_arguments
from fodit.models.ulysses import attend, joined


class CogVideoXUlyssesProcessor:
    """Attention processor over a sharded joint sequence. Takes and returns this rank's tokens."""

    _attention_backend = None  # set by the model's set_attention_backend()

    def __init__(self, sequence: ShardedSequence) -> None:
        self.sequence = sequence

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        later: Later | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video and text of this rank, after attention.

        With a list `later` the items of the batch go one after the other. Only the first one is returned; the list
        then holds a function for each other item, to be called in order, and the caller goes on with one item while
        the next one is exchanged. `meanwhile` is called when the first item's projections are under way: until then
        the other items need not be there.
        """
        if attention_mask is not None:
            raise NotImplementedError("attention_mask is not supported on a sharded CogVideoX sequence; pass None")

        def prepare(
            query: torch.Tensor, key: torch.Tensor, heads: tuple[int, int]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            norms = (attn.norm_q, attn.norm_k)
            return rows.arrive_layer_norm(query, key, norms, image_rotary_emb, self.sequence.text)

        refuse_ignored(torch.nn.LayerNorm, {"norm_q": attn.norm_q, "norm_k": attn.norm_k})
        joint, text = joined(encoder_hidden_states, hidden_states), encoder_hidden_states.shape[1]
        parts = joint.shape[0] if later is not None else 1

        def split(part: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            output = part()
            return output[:, text:], output[:, :text]

        arrive = with_weights(prepare, attn.norm_q, attn.norm_k)
        first, *others = attend(
            attn, joint, self.sequence, arrive, self._attention_backend, parts=parts, meanwhile=meanwhile
        )
        if later is not None:
            later.extend(partial(split, other) for other in others)
        return split(first)


class ShardJoint(ModelHook):
    """On the first block: every rank goes on with its part of the joint sequence."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        given = named_arguments(module, args, kwargs)
        video, text = given["hidden_states"], given["encoder_hidden_states"]
        self._sequence.begin(text.shape[1] + video.shape[1], text.shape[1])
        given["hidden_states"] = self._sequence.shard_video(video)
        given["encoder_hidden_states"] = self._sequence.shard_text(text)
        return (), given


def _fused_blocks(transformer: Any, sequence: ShardedSequence) -> list[tuple[torch.nn.Module, FusedBlock]]:
    tail = Tail(lambda: transformer.transformer_blocks)
    return [(block, FusedCogVideoXBlock(sequence, tail)) for block in transformer.transformer_blocks]


FAMILY = ModelFamily(
    transformer=CogVideoXTransformer3DModel,
    processor=CogVideoXUlyssesProcessor,
    self_attentions=lambda transformer: [block.attn1 for block in transformer.transformer_blocks],
    fused_blocks=_fused_blocks,
    sequence_hooks=lambda transformer, sequence: [
        (transformer.transformer_blocks[0], ShardJoint(sequence)),
        (transformer.proj_out, GatherVideo(sequence)),
    ],
    passes_in_one_call=True,
)
