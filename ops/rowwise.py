"""How what works row by row cuts a matrix: into tiles on a GPU, into blocks that stay in the cache on a CPU."""
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

WHOLE = 8192        # the longest row that stays in registers: 16 numbers a thread of 16 warps
TILE = 2048         # numbers in a tile of short rows
WIDTH = 1024        # of a patch at the most
CACHED = 1 << 16    # numbers a block on the CPU
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


class Patch(NamedTuple):
    """A tile of a kernel whose rows need not be whole: so many rows, and a block of each."""
    rows: int
    block: int
    num_warps: int

    def options(self) -> dict[str, Any]:
        """As a launch takes them."""
        return dict(ROWS=self.rows, BLOCK=self.block, num_warps=self.num_warps)


def patch(n: int) -> Patch:
    """The patch for rows of n numbers.

    >>> patch(100), patch(50_000)
    (Patch(rows=16, block=128, num_warps=4), Patch(rows=2, block=1024, num_warps=4))
    """
    block = min(WIDTH, max(16, 1 << (n - 1).bit_length()))
    return Patch(TILE // block, block, 4)


def rows(x: Tensor) -> Tensor:
    """x as a matrix of its rows, which may lie apart, each in one piece; x's own memory, if that can be."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def leading(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """x, or a copy, and three sizes and strides that lead to its rows: row (a, b, c) is at a, b and c times their strides.

    >>> leading(torch.empty(5, 1, 1, 8).expand(5, 2, 3, 8))[1:]
    ((1, 5, 6), (0, 8, 0))
    """
    sizes, strides = [1], [0]
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if strides[-1] == size * stride:                # where the one dim ends the next of the other begins
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes, strides = [*sizes, size], [*strides, stride]
    if len(sizes) > 3:
        return leading(x.contiguous())
    return x, (*[1] * (3 - len(sizes)), *sizes), (*[0] * (3 - len(sizes)), *strides)


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype that sums over x are made in."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> dict[str, Any]:
    """That dtype as a kernel takes it."""
    import triton.language as tl
    return dict(WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32)


def blocks(*xs: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same rows of each, so many as make up CACHED numbers; views, where an x is contiguous.

    >>> [(len(a), len(b)) for a, b in blocks(torch.empty(5, 1 << 15), torch.empty(5, 1))]
    [(2, 2), (2, 2), (1, 1)]
    """
    if not xs[0].numel():
        return ()
    flat = [rows(x) for x in xs]
    return zip(*[x.split(max(1, CACHED // flat[0].shape[1])) for x in flat], strict=True)
