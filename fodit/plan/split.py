"""Splitting a length into contiguous, nearly even parts."""

from collections.abc import Iterable


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`parts` sizes that add up to `total` and differ by at most one, the larger ones first.

    >>> split_sizes(30, 4)
    (8, 8, 7, 7)
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot split {total} into {parts} parts: need total >= 0 and parts >= 1")
    base, larger = divmod(total, parts)
    return tuple(base + (index < larger) for index in range(parts))


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
