"""How a kernel that works row by row cuts a matrix into tiles."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

WHOLE = 8192        # the longest row that stays in registers: 16 numbers a thread of 16 warps
TILE = 2048         # numbers in a tile of short rows
LONG = 4096         # of a longer row's piece
STRIPS = 512        # programs of a kernel that sums over rows: four on each multiprocessor of an H100, two on an MI300


class Tile(NamedTuple):
    """A tile: so many rows, and of each a block, the whole of it or one of its pieces."""
    rows: int
    block: int
    whole: bool
    num_warps: int

    def options(self) -> dict[str, Any]:
        """As a launch takes them."""
        return dict(ROWS=self.rows, BLOCK=self.block, WHOLE=self.whole, num_warps=self.num_warps)


def tile(n: int) -> Tile:
    """The tile for rows of n numbers.

    >>> tile(768), tile(50_000)
    (Tile(rows=2, block=1024, whole=True, num_warps=4), Tile(rows=1, block=4096, whole=False, num_warps=16))
    """
    if n > WHOLE:
        return Tile(1, LONG, False, LONG // 256)
    block = max(16, 1 << (n - 1).bit_length())
    rows = max(1, TILE // block)
    return Tile(rows, block, True, rows * block // 512)


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype that sums over x are made in."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> dict[str, Any]:
    """That dtype as a kernel takes it."""
    import triton.language as tl
    return dict(WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32)
