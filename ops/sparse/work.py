"""Work lists: the rows of a layout as pieces of about one size, longest first, for the blocks of threads of a GPU.

A GPU starts its programs in order and each runs where there is room, so that the launch takes at most the mean share of a
multiprocessor and one longest piece: pieces are a quarter of that share at most. What is split is merged in another pass.
"""
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 8           # blocks: below it the pass that merges costs more than the split gains
QUARTER = 4         # pieces in a multiprocessor's mean share


@dataclass(frozen=True)
class Work:
    """Pieces of rows, longest first, and which of them make a row together.

    pieces: int32 (W, 5): row, its first block, the end of the full ones, the end, and where a part of a row puts its result: -1
        if it is a whole row.
    splits: int32 (T, 3): row, first place, how many.
    places: the results of parts there are.
    """
    pieces: Tensor
    splits: Tensor
    places: int


def work_list(start: Tensor, full: Tensor, copies: int, width: int) -> Work:
    """The pieces of a layout's rows.

        longest = max(8, (blocks + rows) copies / (4 width))

    Args:
        start: int32 (rows + 1,), on the CPU: where a row's blocks start in the layout.
        full: int32 (rows,): how many of a row's blocks are full, the first ones.
        copies: how often the list runs in one launch: batches, and heads that share the layout.
        width: how many pieces the GPU runs at a time.

    Returns:
        a Work, at most rows + 4 width / copies pieces and as many places: O(rows) time.

    >>> work = work_list(torch.tensor([0, 1, 33]), torch.tensor([1, 9]), copies=1, width=1)
    >>> work.pieces.tolist()
    [[1, 1, 9, 9, 0], [1, 9, 10, 17, 1], [1, 17, 17, 25, 2], [1, 25, 25, 33, 3], [0, 0, 1, 1, -1]]
    >>> work.splits.tolist()
    [[1, 0, 4]]
    """
    start, full = start.long(), full.long()
    size = start.diff()
    longest = max(LEAST, -(-(int(start[-1]) + len(size)) * copies // (QUARTER * width)))
    parts = (-(-size // longest)).clamp(min=1)                                  # an empty row is a piece too: it has zeros to write
    row = torch.arange(len(size)).repeat_interleave(parts)
    part = torch.arange(len(row)) - (parts.cumsum(0) - parts)[row]
    first, end = (start[row] + size[row] * p // parts[row] for p in (part, part + 1))
    middle = torch.minimum((start[:-1] + full)[row].maximum(first), end)
    split = parts > 1
    place = torch.where(split[row], split[row].cumsum(0) - 1, -1)
    order = (end - first).argsort(descending=True, stable=True)
    splits = split.nonzero().flatten()
    count = parts[splits]
    return Work(
        torch.stack([row, first, middle, end, place], 1)[order].int(),
        torch.stack([splits, count.cumsum(0) - count, count], 1).int(), int(count.sum()))


def makespan(costs: Iterable[int], width: int) -> int:
    """How long a launch takes if each piece starts in order where the first place gets free: a model, not a measurement."""
    busy = [0] * width
    for cost in costs:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)
