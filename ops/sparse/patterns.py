"""Layouts of the literature, as lists of blocks: built in time and memory of these.

Rows and columns are aligned at their ends, as `causal` is: with R blocks of queries and C of keys, row r is at home in column
r + C - R. A layout made with `causal=True` never sees the future, whatever it is made of: it is cut within blocks too.
"""
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..threefry import threefry_uniform
from .layout import Layout, blocks, stack

Lengths = int | tuple[int, int]
Pairs = tuple[Tensor, Tensor]                               # rows and columns of blocks
Pattern = Callable[[int, int], Sequence[Pairs]]             # those of so many rows and columns


def dense(lengths: Lengths, block: int = 64, *, causal: bool = False) -> Layout:
    """Every block.

    >>> dense((100, 200)).density
    1.0
    """
    return built(lengths, block, causal, lambda R, C: [every(range(R), range(C))])


def sliding_window(lengths: Lengths, block: int = 64, *, window: int = 3, causal: bool = False) -> Layout:
    """A band of `window` blocks, an odd number, around the diagonal.

    >>> from fspeed.ops.sparse import show
    >>> print(show(sliding_window(4 * 16, 16)))
    ██··
    ███·
    ·███
    ··██
    """
    return built(lengths, block, causal, lambda R, C: [band(R, C, window)])


def fixed(
    lengths: Lengths, block: int = 64, *, local: int = 4, globals: int = 1, horizontal: bool = False, patterns: int = 1,
    heads: int = 1, causal: bool = False,
) -> Layout:
    """Windows of `local` blocks that see themselves, and the last `globals` blocks of each, which all see.

    Args:
        lengths: of queries and keys in tokens, or both in one number.
        block: tokens a side.
        local: blocks of a window.
        globals: how many of a window's blocks stand for it; a divisor of local.
        horizontal: whether these see all blocks too.
        patterns: head h's blocks are the last but h % patterns, in windows of `globals`.
        heads: how many heads have a layout of their own; 1 if all are alike.
        causal: whether nobody sees the future.

    >>> from fspeed.ops.sparse import show
    >>> print(show(fixed(8 * 16, 16, causal=True)))
    ▒·······
    █▒······
    ██▒·····
    ███▒····
    ···█▒···
    ···██▒··
    ···███▒·
    ···████▒

    R. Child et al., "Generating long sequences with sparse transformers", arXiv 1904.10509.
    """
    if globals < 1 or local % globals or not 1 <= patterns <= local // globals:
        raise ValueError(f"fixed: windows of {local} blocks, {globals} of them global, {patterns} patterns: expected globals to "
                         "divide local, and patterns in [1, local / globals]")

    def head(h: int) -> Layout:
        def pairs(R: int, C: int) -> list[Pairs]:
            first = local - (1 + h % patterns) * globals
            starts = [min(at + first, max(C - globals, 0)) for at in range(0, C, local)]
            chosen = [c for at in starts for c in range(at, min(at + globals, C))]
            rows = at_home(chosen, R, C) if horizontal else []
            return [within_windows(R, C, [local]), every(range(R), chosen), every(rows, range(C))]

        return built(lengths, block, causal, pairs)

    return stack([head(h) for h in range(heads)]) if patterns > 1 else head(0)


def variable(
    lengths: Lengths, block: int = 64, *, windows: Sequence[int] = (4,), globals: Sequence[int | tuple[int, int]] = (0,),
    horizontal: bool = False, random: int = 0, key: Tensor | None = None, heads: int = 1, causal: bool = False,
) -> Layout:
    """Windows of any sizes that see themselves, blocks that all see, and random ones.

    Args:
        lengths: of queries and keys in tokens, or both in one number.
        block: tokens a side.
        windows: blocks of each window; the last size repeats.
        globals: blocks that all see, or ranges (start, end) of such; those beyond the end count for nothing.
        horizontal: whether these see all blocks too.
        random: how many random blocks each row sees, of the past only if causal.
        key: int32 (2,), for these; that of seed 0 if None.
        heads: how many heads draw their own; 1 if all are alike.
        causal: whether nobody sees the future.
    """
    def pairs(R: int, C: int) -> list[Pairs]:
        chosen = [c for g in globals for c in (range(*g) if isinstance(g, tuple) else (g,)) if c < C]
        rows = at_home(chosen, R, C) if horizontal else []
        return [within_windows(R, C, windows), every(range(R), chosen), every(rows, range(C))]

    return scattered(lengths, block, causal, pairs, random, key, heads)


def bigbird(
    lengths: Lengths, block: int = 64, *, window: int = 3, globals: int = 1, random: int = 1, key: Tensor | None = None,
    heads: int = 1, causal: bool = False,
) -> Layout:
    """A band, the first blocks, which all see and which see all, and random ones.

    Args:
        lengths, block, random, key, heads, causal: as of `variable`.
        window: blocks of the band, an odd number.
        globals: how many of the first blocks are global.

    >>> bigbird(64 * 16, 16, random=2, heads=4).heads
    4

    M. Zaheer et al., "Big Bird: transformers for longer sequences", arXiv 2007.14062.
    """
    pairs = lambda R, C: [band(R, C, window), *cross(range(globals), R, C)]
    return scattered(lengths, block, causal, pairs, random, key, heads)


def bslongformer(
    lengths: Lengths, block: int = 64, *, window: int = 3, globals: Sequence[int | tuple[int, int]] = (0,), causal: bool = False,
) -> Layout:
    """A band, and blocks, or ranges (start, end) of them, which all see and which see all.

    I. Beltagy, M. E. Peters, A. Cohan, "Longformer: the long-document transformer", arXiv 2004.05150.
    """
    def pairs(R: int, C: int) -> list[Pairs]:
        chosen = [c for g in globals for c in (range(*g) if isinstance(g, tuple) else (g,)) if c < C]
        return [band(R, C, window), *cross(chosen, R, C)]

    return built(lengths, block, causal, pairs)


def scattered(
    lengths: Lengths, block: int, causal: bool, pairs: Pattern, random: int, key: Tensor | None, heads: int,
) -> Layout:
    """The layout of pairs and of random blocks, different ones for each head."""
    if not random:
        return built(lengths, block, causal, pairs)
    key = torch.zeros(2, dtype=torch.int32) if key is None else key
    Nq, Nk = both(lengths)

    def head(h: int) -> Layout:
        def more(R: int, C: int) -> list[Pairs]:
            last = (torch.arange(1, R + 1) * block).clamp(max=Nq) - 1 + Nk - Nq
            sees = torch.full((R,), C) if not causal else (last // block + 1).clamp(0, C)
            return [*pairs(R, C), choices(sees, random, key, h)]

        return built(lengths, block, causal, more)

    return stack([head(h) for h in range(heads)])


def built(lengths: Lengths, block: int, causal: bool, pairs: Pattern) -> Layout:
    Nq, Nk = both(lengths)
    found = pairs(blocks(Nq, block), blocks(Nk, block))
    row, column = (torch.cat([pair[side] for pair in found]) for side in (0, 1))
    layout = Layout.at(row, column, (Nq, Nk), block)
    return layout.causal() if causal else layout


def both(lengths: Lengths) -> tuple[int, int]:
    return lengths if isinstance(lengths, tuple) else (lengths, lengths)


def every(rows: Sequence[int], columns: Sequence[int]) -> Pairs:
    """All pairs of these."""
    row, column = torch.tensor(list(rows), dtype=torch.int64), torch.tensor(list(columns), dtype=torch.int64)
    return row.repeat_interleave(len(column)), column.repeat(len(row))


def at_home(columns: Sequence[int], R: int, C: int) -> list[int]:
    """The rows of these columns."""
    return [c + R - C for c in columns if 0 <= c + R - C < R]


def cross(chosen: Sequence[int], R: int, C: int) -> list[Pairs]:
    """Blocks that all see and that see all."""
    chosen = [c for c in chosen if c < C]
    return [every(range(R), chosen), every(at_home(chosen, R, C), range(C))]


def band(R: int, C: int, window: int) -> Pairs:
    if window < 1 or window % 2 == 0:
        raise ValueError(f"a window of {window} blocks: expected an odd number, so many on either side")
    row = torch.arange(R).repeat_interleave(window)
    column = row + C - R + torch.arange(window).repeat(R) - window // 2
    inside = (column >= 0) & (column < C)
    return row[inside], column[inside]


def within_windows(R: int, C: int, sizes: Sequence[int]) -> Pairs:
    """Blocks of one window; the last size repeats."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"windows of {sizes} blocks: expected one or more sizes of 1 or more")
    starts = [0]
    while starts[-1] < C:
        starts.append(starts[-1] + sizes[min(len(starts) - 1, len(sizes) - 1)])
    pairs = [every(at_home(range(a, min(b, C)), R, C), range(a, min(b, C))) for a, b in pairwise(starts)]
    return torch.cat([row for row, _ in pairs]), torch.cat([column for _, column in pairs])


def choices(sees: Tensor, n: int, key: Tensor, head: int) -> Pairs:
    """For each row n different ones of its first `sees` columns, all alike probable; all of them if they are fewer.

    R. Floyd's way: of j + 1 things for j up to sees - 1, take a random one, or j if that was taken.
    """
    R = len(sees)
    draws = threefry_uniform(key, head * R * n, R * n).view(R, n).double()
    taken = torch.full((R, n), -1)
    for i in range(n):
        j = sees - n + i
        pick = (draws[:, i] * (j + 1)).long()
        taken[:, i] = torch.where(j < 0, -1, torch.where((taken == pick[:, None]).any(1), j, pick))
    row = torch.arange(R)[:, None].expand(R, n)
    return row[taken >= 0], taken[taken >= 0]
