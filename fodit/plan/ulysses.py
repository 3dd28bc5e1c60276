"""Where tokens and heads lie in Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509).

Every rank holds a contiguous range of the sequence. For attention it gets some heads of the whole sequence, and
gives the result back afterwards. Both ranges may be uneven: 17 776 tokens or 30 heads on 4 ranks, any number, and by
intention where cards are of different speed.

All buffers are token-major, [token, batch, ...]: then what arrives from the ranks, one behind the other, is already
the whole sequence in order, for any batch size.
"""

from dataclasses import dataclass
from functools import cached_property

from fodit.plan.slabs import Plan, Segment, Slab
from fodit.plan.split import ranges, rank_ranges, share_sizes


def most_head_groups(heads: int, ranks: int, speeds: tuple[int, ...] | None = None) -> int:
    """As many as the fewest heads of a rank."""
    return min(stop - start for start, stop in rank_ranges(heads, ranks, speeds))


@dataclass(frozen=True)
class UlyssesLayout:
    """The layout of one attention on one rank.

    Args:
        rank, ranks: this rank and the Ulysses degree.
        tokens: length of the whole sequence.
        batch: batch size.
        heads, head_dim: attention heads of the whole model and their size.
        shares: head groups that are sent and attended one after the other, by their relative sizes; a number means
            that many even groups. At most the fewest heads of a rank.
        speeds: relative speeds of the ranks, by which tokens and heads are shared out; None for equal ones.
    """

    rank: int
    ranks: int
    tokens: int
    batch: int
    heads: int
    head_dim: int
    shares: int | tuple[int, ...] = 1
    speeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranks > self.heads:
            raise ValueError(
                f"ulysses={self.ranks} needs at least {self.ranks} attention heads, the model has {self.heads}: "
                f"use ulysses <= {self.heads}"
            )
        if self.speeds is not None and (len(self.speeds) != self.ranks or min(self.speeds) < 1):
            raise ValueError(f"{self.ranks} ranks need as many speeds >= 1, got {self.speeds}")
        most = most_head_groups(self.heads, self.ranks, self.speeds)
        if not 1 <= self.groups <= most or min(self.relative_sizes) < 1:
            raise ValueError(
                f"{self.heads} heads on {self.ranks} ranks allow 1 to {most} head groups, got {self.shares}"
            )

    @property
    def relative_sizes(self) -> tuple[int, ...]:
        return (1,) * self.shares if isinstance(self.shares, int) else self.shares

    @property
    def groups(self) -> int:
        return len(self.relative_sizes)

    @cached_property
    def token_ranges(self) -> tuple[tuple[int, int], ...]:
        """Tokens of each rank."""
        return rank_ranges(self.tokens, self.ranks, self.speeds)

    @cached_property
    def head_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """`head_ranges[rank][group]`: heads of that group on that rank."""
        result = []
        for start, stop in rank_ranges(self.heads, self.ranks, self.speeds):
            groups = ranges(share_sizes(stop - start, self.relative_sizes))
            result.append(tuple((start + first, start + last) for first, last in groups))
        return tuple(result)

    @property
    def local_tokens(self) -> int:
        start, stop = self.token_ranges[self.rank]
        return stop - start

    @property
    def returns_lie_ready(self) -> bool:
        """Whether what comes back of all other ranks' heads is one block: then nothing is put side by side."""
        return self.groups == 1 and self.ranks == 2

    def rank_heads(self, rank: int) -> tuple[int, int]:
        """All heads of a rank."""
        groups = self.head_ranges[rank]
        return groups[0][0], groups[-1][1]

    def group_heads(self, rank: int, group: int) -> int:
        start, stop = self.head_ranges[rank][group]
        return stop - start

    def _elements(self, tokens_of: int, heads_of: int, group: int) -> int:
        start, stop = self.token_ranges[tokens_of]
        return (stop - start) * self.batch * self.group_heads(heads_of, group) * self.head_dim

    @cached_property
    def projection_plan(self) -> Plan:
        """The plan of q, k and v. Made once."""
        return self.column_plan(3)

    @cached_property
    def projection_matrices(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Where that plan stores them. Made once."""
        return self.matrices(3)

    def matrices(self, projections: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Where `column_plan` stores what: `[group][rank]` is (offset, width) of what a rank's heads get.

        It is a matrix [token, batch, projection, width] of the local tokens. The buffer begins with all that is
        received, where this rank's own matrices have their place; those for the others follow.
        """
        sizes = self._projection_sizes(projections)
        begin, offset, result = 0, sum(sum(recv) for _, recv in sizes), []
        for group, (send, recv) in enumerate(sizes):
            own, places = begin + sum(recv[: self.rank]), []
            for rank in range(self.ranks):
                width = self.group_heads(rank, group) * self.head_dim
                places.append((own if rank == self.rank else offset, width))
                offset += send[rank]
            result.append(tuple(places))
            begin += sum(recv)
        return tuple(result)

    def _projection_sizes(self, projections: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each group: elements to send to each rank, 0 to itself, and of each rank in what is received."""
        result = []
        for group in range(self.groups):
            send = [projections * self._elements(self.rank, rank, group) for rank in range(self.ranks)]
            recv = [projections * self._elements(rank, self.rank, group) for rank in range(self.ranks)]
            send[self.rank] = 0
            result.append((tuple(send), tuple(recv)))
        return result

    def column_plan(self, projections: int) -> Plan:
        """GEMM + all-to-all of `projections` weights, each [heads * head_dim, K].

        A's rows are the local tokens, batch-major as [batch, token]. Slab g holds, for each other rank, the matrix
        [token, batch, projection, head, head_dim] of that rank's g-th head group. Received, slab g is that matrix for
        this rank's heads and all tokens, of which the local tokens' part is not sent but `Plan.local`.
        """
        dim, local = self.head_dim, self.local_tokens
        sizes, slabs = self._projection_sizes(projections), []
        mine: list[Segment] = []
        begin, start = 0, sum(sum(recv) for _, recv in sizes)
        for group, places in enumerate(self.matrices(projections)):
            segments: list[Segment] = []
            for rank, (offset, width) in enumerate(places):
                first = self.head_ranges[rank][group][0] * dim
                row = self.batch * projections * width  # elements between consecutive tokens
                for item in range(self.batch):
                    for weight in range(projections):
                        address = offset + (item * projections + weight) * width
                        rows = (item * local, (item + 1) * local)
                        one = Segment(*rows, first, first + width, weight, address, row)
                        (mine if rank == self.rank else segments).append(one)
            send, recv = sizes[group]
            stop, end = start + sum(send), begin + sum(recv)
            slabs.append(Slab(tuple(segments), start, stop, begin, end, send, recv))
            start, begin = stop, end
        widths = (self.heads * dim,) * projections
        return Plan("all_to_all", self.ranks, self.batch * local, widths, tuple(slabs), start, begin, tuple(mine))

    def return_sizes(self, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements to send to and receive from each rank when the attention output of a head group goes back.

        Sent is [token, batch, head, head_dim] of all tokens and this rank's heads of the group, of which its own
        tokens stay; received, one rank's block behind the other, the same of the local tokens and each other rank's
        heads.
        """
        send = tuple(self._elements(rank, self.rank, group) for rank in range(self.ranks))
        recv = [self._elements(self.rank, rank, group) for rank in range(self.ranks)]
        recv[self.rank] = 0
        return send, tuple(recv)
