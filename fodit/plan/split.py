"""Splitting a length into contiguous, nearly even parts."""

from collections.abc import Iterable, Sequence


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`parts` sizes that add up to `total` and differ by at most one, the larger ones first.

    >>> split_sizes(30, 4)
    (8, 8, 7, 7)
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot split {total} into {parts} parts: need total >= 0 and parts >= 1")
    base, larger = divmod(total, parts)
    return tuple(base + (index < larger) for index in range(parts))


def share_sizes(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """`total` split in proportion to `shares`, as near as whole numbers allow; no part is empty.

    >>> share_sizes(10, (1, 3, 1))
    (2, 6, 2)
    """
    if min(shares, default=0) < 1 or len(shares) > total:
        raise ValueError(f"cannot split {total} in proportion to {tuple(shares)}: need 1 to {total} shares >= 1")
    whole = sum(shares)
    sizes = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: total * shares[index] % whole, reverse=True)
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return tuple(sizes)


def ranges(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of these sizes, one behind the other from 0."""
    result, start = [], 0
    for size in sizes:
        result.append((start, start + size))
        start += size
    return tuple(result)


def split_ranges(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The half-open ranges of `split_sizes(total, parts)`.

    >>> split_ranges(5, 2)
    ((0, 3), (3, 5))
    """
    return ranges(split_sizes(total, parts))


def rank_ranges(total: int, ranks: int, speeds: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """What each rank has of `total`: in proportion to the speeds, or nearly even parts.

    >>> rank_ranges(6, 2, (2, 1))
    ((0, 4), (4, 6))
    """
    return split_ranges(total, ranks) if speeds is None else ranges(share_sizes(total, speeds))
