"""Transformer blocks whose element-wise chains are row operations of `fodit.kernels.rows`, one pass over memory each.

A hook takes the place of a block's forward. Attention and the projections stay modules that are called, so adapters,
quantised weights and processors keep working; only norms, modulations, gates, residuals and the GELU are computed
here. Where a block is not built as expected its own forward runs, and `reasons` says why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.hooks import ModelHook
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import CogVideoXLayerNormZero, FP32LayerNorm
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from fodit.kernels import rows
from fodit.kernels.modulation import Modulation
from fodit.models.modules import is_watched, why_called
from fodit.models.sequence import ShardedSequence
from fodit.models.ulysses import joined

Later = list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]  # video and text of further items of the batch


class FusedBlock(ModelHook):
    """On a block: the fused forward. Register it before other hooks of the block, so that theirs surround it.

    Attributes:
        reasons: why a block's own forward ran, or a part of it was not fused, since `Attachment.reset()`.
    """

    block: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.reasons: set[str] = set()

    def _applies(self, block: Any) -> bool:
        inner = getattr(self.fn_ref.original_forward, "__func__", None)
        if type(block) is not self.block:
            reason: str | None = f"the block is a {type(block).__name__}"
        elif inner is not self.block.forward:
            reason = "the block's forward was replaced or has hooks from before attach()"
        else:
            reason = self._unexpected(block)
        if reason is not None:
            self.reasons.add(f"block not fused: {reason}")
        return reason is None

    def _unexpected(self, block: Any) -> str | None:
        """What about the parts of the block stands in the way of computing them here."""
        raise NotImplementedError

    def _feed_forward(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """`module(x)` with bias and GELU in the first product's epilogue, if it is a plain product."""
        if type(module) is not FeedForward or is_watched(module):
            self.reasons.add(f"GELU not fused: the feed-forward is a {type(module).__name__} or has hooks")
            return module(x)
        first, *rest = module.net
        if type(first) is not GELU or first.approximate != "tanh" or is_watched(first):
            self.reasons.add(f"GELU not fused: the activation is {type(first).__name__} or has hooks")
            x = first(x)
        elif (reason := why_called({"its projection": first.proj}, x.device.type)) is not None:
            self.reasons.add(f"GELU not fused: {reason}")
            x = first(x)
        else:
            x = rows.linear_gelu(x, first.proj.weight, first.proj.bias)
        for one in rest:
            x = one(x)
        return x


class FusedWanBlock(FusedBlock):
    block = WanTransformerBlock

    def new_forward(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: Any,
    ) -> torch.Tensor:
        """[batch, tokens, C] → the same. temb [batch, 6, C], or [batch, tokens, 6, C] with a timestep per token."""
        if not self._applies(module):
            return self.fn_ref.original_forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
        vectors, table = temb if temb.ndim == 4 else temb.unsqueeze(1), module.scale_shift_table[0]
        attention, mlp = Modulation(vectors, table), Modulation(vectors, table, first=3)

        normed = rows.normalise(hidden_states, module.norm1, attention)
        attended = module.attn1(normed, None, None, rotary_emb)
        if isinstance(module.norm2, nn.Identity):
            hidden_states = normed = rows.add(hidden_states, attended, gate=attention)
        else:
            hidden_states, normed = rows.add_normalise(hidden_states, attended, module.norm2, gate=attention)
        attended = module.attn2(normed, encoder_hidden_states, None, None)
        hidden_states, normed = rows.add_normalise(hidden_states, attended, module.norm3, modulation=mlp)
        return rows.add(hidden_states, self._feed_forward(module.ffn, normed), gate=mlp)

    def _unexpected(self, block: Any) -> str | None:
        return _unexpected_norm(
            {
                "norm1": (block.norm1, (FP32LayerNorm,)),
                "norm2": (block.norm2, (FP32LayerNorm, nn.Identity)),
                "norm3": (block.norm3, (FP32LayerNorm,)),
            }
        )


class Tail:
    """The end of a block that waits until the next block has its first product under way.

    Blocks exchange one item of the batch while they compute another. At a block's start there would be nothing to
    compute but products; with the last item's MLP put off until then there is::

        compute   ...[ attention 1 ][ out, MLP 0 ] | [ qkv 0 ][ out, MLP 1 of the last block ][ qkv 1 ][ attention 0 ]
        comm           [ output 0 ]  [ output 1 ]  |        [ qkv 0 ]                              [ qkv 1 ]

    Args:
        blocks: gives those of the transformer, in order: they may be others in the next forward. Nothing is put off
            where somebody else's hooks are on them, for these would see what is not finished, nor while torch.compile
            traces.

    Attributes:
        reasons: why nothing is put off, since the last forward began.
    """

    def __init__(self, blocks: Callable[[], Sequence[nn.Module]]) -> None:
        self._all, self._allowed = blocks, False
        self._blocks: Sequence[nn.Module] = ()
        self.reasons: set[str] = set()
        self._work: Callable[[], None] | None = None

    def begin(self, block: nn.Module) -> None:
        """A block starts. With the first one forget a forward that was broken off, and look for hooks."""
        blocks = self._all()
        if blocks and block is blocks[0]:
            self._work, self._blocks = None, blocks
            watched = any(is_watched(one) for one in self._blocks)
            self.reasons = {"an MLP does not hide the next block's exchange: blocks have hooks"} if watched else set()
            self._allowed = not torch.compiler.is_compiling() and not watched

    def put_off(self, block: nn.Module, work: Callable[[], None]) -> None:
        """Do it now if it cannot wait for a next block."""
        if self._allowed and block is not self._blocks[-1]:
            self._work = work
        else:
            work()

    def finish(self) -> None:
        """Do what was put off."""
        work, self._work = self._work, None
        if work is not None:
            work()


class FusedCogVideoXBlock(FusedBlock):
    """Text and video stay one joint tensor, of which the block's inputs and outputs are views.

    Args:
        sequence: where the items of a batch go one after the other if it has exchanges to hide; None for one rank.
        tail: of the transformer's blocks.
    """

    block = CogVideoXBlock

    def __init__(self, sequence: ShardedSequence | None = None, tail: Tail | None = None) -> None:
        super().__init__()
        self._sequence, self._tail = sequence, tail or Tail(list)

    def new_forward(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: Any = None,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """video [batch, tokens, C], text [batch, text, C], temb [batch, time_embed_dim] → video, text."""
        self._tail.begin(module)
        if not self._applies(module):
            self._tail.finish()
            return self.fn_ref.original_forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, attention_kwargs
            )
        text = encoder_hidden_states.shape[1]
        joint = joined(encoder_hidden_states, hidden_states)
        normed, total = joint.new_empty(joint.shape), joint.new_empty(joint.shape)
        attention, mlp = _modulation(module.norm1, temb, text), _modulation(module.norm2, temb, text)

        def normalise(item: slice) -> None:
            rows.normalise(joint[item], module.norm1.norm, attention.of(item), out=normed[item])

        def finish(item: slice, attended: tuple[torch.Tensor, torch.Tensor]) -> None:
            video_part, text_part = attended
            gate, modulation = attention.of(item), mlp.of(item)
            residual, second = rows.add_normalise(
                joint[item], joined(text_part, video_part), module.norm2.norm, gate=gate, modulation=modulation
            )
            rows.add(residual, self._feed_forward(module.ff, second), gate=modulation, out=total[item])

        def meanwhile() -> None:
            self._tail.finish()
            for item in others:
                normalise(item)

        first, *others = self._items(joint.shape[0], module.attn1)
        if not others:
            self._tail.finish()
        normalise(first)
        later: Later = []
        attended = module.attn1(
            hidden_states=normed[:, text:],
            encoder_hidden_states=normed[:, :text],
            image_rotary_emb=image_rotary_emb,
            **({"later": later, "meanwhile": meanwhile} if others else {}),
            **(attention_kwargs or {}),
        )
        finish(first, attended)
        for item, wait in zip(others[:-1], later[:-1], strict=True):
            finish(item, wait())
        if others:
            self.reasons |= self._tail.reasons
            self._tail.put_off(module, lambda: finish(others[-1], later[-1]()))
        return total[:, text:], total[:, :text]

    def _items(self, batch: int, attention: nn.Module) -> list[slice]:
        """Parts of the batch that go one after the other. One where hooks on the attention would see but the first."""
        if self._sequence is None or not self._sequence.pipelined:
            return [slice(0, batch)]
        if batch > 1 and is_watched(attention):
            self.reasons.add("the batch is not exchanged item by item: the attention has hooks")
            return [slice(0, batch)]
        return [slice(index, index + 1) for index in range(batch)]

    def _unexpected(self, block: Any) -> str | None:
        for name in ("norm1", "norm2"):
            outer = getattr(block, name)
            if (reason := _unexpected_norm({name: (outer, (CogVideoXLayerNormZero,))})) is not None:
                return reason
            if (reason := _unexpected_norm({f"{name}.norm": (outer.norm, (nn.LayerNorm,))})) is not None:
                return reason
        return None


def _modulation(norm: CogVideoXLayerNormZero, temb: torch.Tensor, text: int) -> Modulation:
    vectors = norm.linear(norm.silu(temb))
    return Modulation(vectors.view(vectors.shape[0], 1, 6, -1), text=text)


def _unexpected_norm(found: dict[str, tuple[nn.Module, tuple[type, ...]]]) -> str | None:
    for name, (module, kinds) in found.items():
        if type(module) not in kinds:
            return f"{name} is a {type(module).__name__}, not a {kinds[0].__name__}"
        if is_watched(module):
            return f"{name} has hooks"
    return None
