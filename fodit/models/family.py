"""What fodit needs to know about one kind of transformer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diffusers.hooks import ModelHook
from torch import nn

from fodit.models.blocks import FusedBlock
from fodit.models.sequence import ShardedSequence


@dataclass(frozen=True)
class ModelFamily:
    """
    Attributes:
        transformer: diffusers' class.
        processor: attention processor for the self-attentions, made from a `ShardedSequence`.
        self_attentions: the attention modules whose tokens are sharded.
        fused_blocks: the blocks, and hooks with a fused forward for them.
        sequence_hooks: modules and the hooks that shard and gather the sequence there.
        passes_in_one_call: guidance makes both passes in one call with a doubled batch (else in two calls).
    """

    transformer: type[nn.Module]
    processor: Callable[[ShardedSequence], Any]
    self_attentions: Callable[[Any], list[Any]]
    fused_blocks: Callable[[Any, ShardedSequence], list[tuple[nn.Module, FusedBlock]]]
    sequence_hooks: Callable[[Any, ShardedSequence], list[tuple[nn.Module, ModelHook]]]
    passes_in_one_call: bool
