"""How a layout is run on a CPU: pieces of rows with as many blocks each, some at a time, so that their scores stay in the cache."""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .layout import Layout

SCORES = 1 << 17        # of a chunk, a thread: 512 kB of float32


@dataclass(frozen=True, eq=False)
class Chunk:
    """Pieces of rows, of d blocks each, of which the last c are cut by masks.

    A line is a row of blocks of a layout head in a batch: heads that share a layout and keys are stacked in one.
    """
    line: Tensor            # int64 (n,), no two alike
    index: Tensor           # int64 (n, d): blocks of keys, of all batches and heads
    masks: Tensor           # int64 (n, c): which of the layout's masks cut the last c blocks
    first: bool             # whether the line has no pieces in chunks before this

    @cached_property
    def flat(self) -> Tensor:
        return self.index.flatten()


def chunks(layout: Layout, batch: int, heads: int, groups: int) -> list[Chunk]:
    """All of a layout's blocks, in chunks; kept with the layout.

    Args:
        layout: on the CPU, with one head or as many as the queries.
        batch, heads, groups: batches, heads of queries, and of keys.
    """
    made: dict[tuple, list[Chunk]] = layout.__dict__.setdefault("_chunks", {})
    key = batch, heads, groups, torch.get_num_threads()
    if key not in made:
        made[key] = list(cut(layout, batch, heads, groups, SCORES * key[-1]))
    return made[key]


def cut(layout: Layout, batch: int, heads: int, groups: int, scores: int) -> Iterator[Chunk]:
    """Chunks of so many scores."""
    stack = heads // groups if layout.heads == 1 else 1
    R, C = layout.shape
    start, full, index, mask = (getattr(layout.rows, name).long() for name in ("start", "full", "index", "mask"))
    most = max(1, scores // (stack * layout.block**2))                      # blocks of one line
    size = start.diff()
    parts = -(-size // most)
    row = torch.arange(len(size)).repeat_interleave(parts)
    part = torch.arange(len(row)) - (parts.cumsum(0) - parts)[row]
    first, end = (start[row] + size[row] * p // parts[row] for p in (part, part + 1))
    partial = (end - torch.maximum(first, (start[:-1] + full)[row])).clamp(min=0)
    kinds = torch.stack([part, end - first, partial], 1)
    for (part_, d, c), at in grouped(kinds):
        line, columns = row[at], first[at, None] + torch.arange(d)
        line, keys = spread(line, index[columns], layout, batch, heads, groups, R, C)
        cuts = mask[columns[:, d - c :]].repeat(len(line) // len(at), 1)
        some = max(1, most // d)
        yield from (Chunk(*each, part_ == 0) for each in zip(line.split(some), keys.split(some), cuts.split(some), strict=True))


def grouped(kinds: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """Each of the different rows of an integer matrix, in order, and where it is."""
    values, at, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    yield from zip(values.tolist(), at.argsort(stable=True).split(counts.tolist()), strict=True)


def spread(
    row: Tensor, index: Tensor, layout: Layout, batch: int, heads: int, groups: int, R: int, C: int,
) -> tuple[Tensor, Tensor]:
    """Rows of a layout and their blocks, in every batch, and in every head of keys if all heads share the layout."""
    copies = batch * (groups if layout.heads == 1 else 1)
    copy = torch.arange(copies)[:, None]
    keys = copy if layout.heads == 1 else copy * groups + row // R * groups // heads
    line = copy * len(layout.rows.full) + row
    return line.flatten(), (keys[..., None] * C + index).flatten(0, 1)
