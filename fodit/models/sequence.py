"""The part of a token sequence that a rank holds, and the hooks that shard a transformer at its borders."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.hooks import ModelHook

from fodit.ops import Communicator
from fodit.parallel import is_count
from fodit.plan import UlyssesLayout, most_head_groups, rank_ranges

# On two H200 through host memory, 5 groups were the fastest of 1, 2, 5 and 10 for Wan-14B; over NVLink all are alike.
# Where the items of a batch go one after the other there are as many exchanges with fewer groups.
DEFAULT_EXCHANGES = 5
HeadGroups = int | tuple[int, ...] | None


def checked_head_groups(
    head_groups: HeadGroups, heads: int, ranks: int, speeds: tuple[int, ...] | None = None
) -> HeadGroups:
    """`head_groups`, relative sizes as a tuple. Raises ValueError for what is neither, or more than the heads allow."""
    if head_groups is None:
        return None
    sizes = head_groups if isinstance(head_groups, Sequence) else [head_groups]
    if not sizes or not all(map(is_count, sizes)):
        raise ValueError(f"head_groups must be a number >= 1 or relative sizes such as (1, 3, 1), got {head_groups!r}")
    most, count = most_head_groups(heads, ranks, speeds), head_groups if isinstance(head_groups, int) else len(sizes)
    if count > most:
        raise ValueError(f"{heads} heads on {ranks} ranks allow head_groups 1 to {most}, got {head_groups!r}")
    return head_groups if isinstance(head_groups, int) else tuple(sizes)


class ShardedSequence:
    """One transformer's sequence, split over the Ulysses ranks in contiguous parts.

    The joint sequence is text first (where the model joins text and video), then video.

    Args:
        comm: communicator of the Ulysses group.
        heads, head_dim: of the model's self-attention.
        head_groups: parts in which heads are exchanged, a number or their relative sizes; None asks the communicator's
            planner, or makes up to five exchanges of a batch, or one without overlap.
        speeds: relative speeds of the ranks, by which tokens and heads are shared out; None for equal ones.
    """

    def __init__(
        self,
        comm: Communicator,
        heads: int,
        head_dim: int,
        head_groups: HeadGroups = None,
        speeds: tuple[int, ...] | None = None,
    ) -> None:
        self.comm, self.heads, self.head_dim = comm, heads, head_dim
        self.head_groups = checked_head_groups(head_groups, heads, comm.size, speeds)
        self.speeds, self._most_groups = speeds, most_head_groups(heads, comm.size, speeds)
        self.text = self.tokens = 0  # of the forward that is running
        self._layouts: dict[tuple[int, int, torch.dtype, int], UlyssesLayout] = {}

    def begin(self, tokens: int, text: int = 0) -> None:
        """A forward over `tokens` tokens starts, the first `text` of which are text."""
        if tokens < self.comm.size:
            raise ValueError(f"{tokens} tokens cannot be split over ulysses={self.comm.size} ranks")
        self.tokens, self.text = tokens, text

    @property
    def token_ranges(self) -> tuple[tuple[int, int], ...]:
        """Of each rank, in the running forward."""
        return rank_ranges(self.tokens, self.comm.size, self.speeds)

    def shard_text(self, text: torch.Tensor) -> torch.Tensor:
        """[B, text, C] → this rank's part, possibly empty."""
        start, stop = self.token_ranges[self.comm.rank]
        return text[:, start : min(stop, self.text)] if start < self.text else text[:, :0]

    def shard_video(self, video: torch.Tensor) -> torch.Tensor:
        """[B, video, C] → this rank's part, possibly empty."""
        start, stop = self.token_ranges[self.comm.rank]
        return video[:, max(start - self.text, 0) : max(stop - self.text, 0)]

    def gather_video(self, part: torch.Tensor) -> torch.Tensor:
        """[B, this rank's video, C] → [B, video, C] on all ranks."""
        sizes = tuple(max(stop - self.text, 0) - max(start - self.text, 0) for start, stop in self.token_ranges)
        return self.comm.gather_rows(part.transpose(0, 1), sizes).wait().transpose(0, 1)

    @property
    def pipelined(self) -> bool:
        """Whether there are exchanges that computation can hide."""
        return self.comm.overlap and self.comm.size > 1

    def layout(self, batch: int, dtype: torch.dtype, parts: int = 1) -> UlyssesLayout:
        """Of the self-attention in the running forward, of one part of the batch if it goes in equal parts.

        One object for the same sizes, so its plan is made once.
        """
        key = (self.tokens, batch, dtype, parts)
        if key not in self._layouts:
            groups = self.head_groups or self._chosen_groups(batch // parts, dtype, parts)
            self._layouts[key] = UlyssesLayout(
                self.comm.rank,
                self.comm.size,
                self.tokens,
                batch // parts,
                self.heads,
                self.head_dim,
                groups,
                self.speeds,
            )
        return self._layouts[key]

    def attention_calls(self, layout: UlyssesLayout) -> tuple[tuple[int, ...], ...]:
        """For each head group of this rank the heads of each call of attention: one call, unless planned otherwise."""
        if self.comm.planner is not None:
            return self.comm.planner.attention_calls(layout)
        return tuple((layout.group_heads(layout.rank, group),) for group in range(layout.groups))

    def _chosen_groups(self, batch: int, dtype: torch.dtype, parts: int) -> int | tuple[int, ...]:
        if not self.pipelined:
            return 1
        if self.comm.planner is not None:
            groups = self.comm.planner.head_groups(self.tokens, batch, self.heads, self.head_dim, parts, dtype)
            return groups if len(groups) <= self._most_groups else self._most_groups
        return min(-(-DEFAULT_EXCHANGES // parts), self._most_groups)


class GatherVideo(ModelHook):
    """On the last projection, the smallest tensor after the blocks: every rank gets the output of all tokens."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return self._sequence.gather_video(output)


def named_arguments(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `module.forward`, each by its name."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return {name: value for name, value in bound.arguments.items() if value is not module}
