"""CogVideoX: text and video are one joint sequence, normalised per head and rotated over the video tokens."""

from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.hooks import ModelHook
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb

from fodit.models.family import ModelFamily
from fodit.models.sequence import GatherVideo, ShardedSequence, named_arguments, refuse_training
from fodit.models.ulysses import attend_groups, project_qkv

Rotary = tuple[torch.Tensor, torch.Tensor]


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if attention_mask is not None:
            raise NotImplementedError("attention_mask is not supported on a sharded CogVideoX sequence; pass None")
        joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        layout = self.sequence.layout(joint.shape[0])
        arrivals = project_qkv(attn, joint.flatten(0, 1), self.sequence, layout.projection_plan())

        def prepare(raw: torch.Tensor, heads: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            query, key, value = raw.transpose(0, 1).unbind(2)
            if attn.norm_q is not None:
                query = attn.norm_q(query)
            if attn.norm_k is not None:
                key = attn.norm_k(key)
            return self._rotate(query, image_rotary_emb), self._rotate(key, image_rotary_emb), value

        attended = attend_groups(arrivals, prepare, layout, self.sequence, self._attention_backend)
        output = attn.to_out[1](attn.to_out[0](attended))
        text = encoder_hidden_states.shape[1]
        return output[:, text:], output[:, :text]

    def _rotate(self, heads: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """RoPE on the video part of [batch, token, head, dim]."""
        if rotary is None:
            return heads
        text, video = heads[:, : self.sequence.text], heads[:, self.sequence.text :]
        return torch.cat([text, apply_rotary_emb(video, rotary, sequence_dim=1)], dim=1)


class ShardJoint(ModelHook):
    """On the first block: every rank goes on with its part of the joint sequence."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        given = named_arguments(module, args, kwargs)
        video, text = given["hidden_states"], given["encoder_hidden_states"]
        refuse_training(video)
        self._sequence.begin(text.shape[1] + video.shape[1], text.shape[1])
        given["hidden_states"] = self._sequence.shard_video(video)
        given["encoder_hidden_states"] = self._sequence.shard_text(text)
        return (), given


FAMILY = ModelFamily(
    transformer=CogVideoXTransformer3DModel,
    processor=CogVideoXUlyssesProcessor,
    self_attentions=lambda transformer: [block.attn1 for block in transformer.transformer_blocks],
    sequence_hooks=lambda transformer, sequence: [
        (transformer.transformer_blocks[0], ShardJoint(sequence)),
        (transformer.proj_out, GatherVideo(sequence)),
    ],
    passes_in_one_call=True,
)
