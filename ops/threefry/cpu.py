"""Threefry2x32 on the CPU: blocks that stay in the cache, hashed in place by numpy; a key's few draws in Python integers."""
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .reference import PARITY, ROTATIONS, threefry2x32

Words = NDArray[np.uint32]

BLOCK = 1 << 15        # draws: three buffers of 32-bit words and two of 64-bit counters, 900 KB in the L2 cache
FEW = 8                # draws: numpy's 115 calls a block take as long as 10 hashes in Python integers
MASK = 0xFFFFFFFF


def pairs(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    size = (*shape(start, n), 2)
    if math.prod(size) <= 2 * FEW:                     # a step's keys: without the buffers 8 us, not 13
        return torch.from_numpy(few(key, start, n).view(np.int32).reshape(size))
    return draw(interleave, key, start, n, np.empty(size, np.int32))


def bits(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return draw(exclusive_or, key, start, n, np.empty(shape(start, n), np.int32))


def uniform(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return draw(fraction, key, start, n, np.empty(shape(start, n), np.float32))


def shape(start: int | Tensor, n: int) -> tuple[int, ...]:
    return (*start.shape, n) if isinstance(start, Tensor) else (n,)


def draw(finish: Callable[[Words, Words, NDArray], None], key: Tensor, start: int | Tensor, n: int, out: NDArray) -> Tensor:
    """out, after finish(x0, x1, its part of out) for block after block of counters. In numpy: torch.func wraps what torch makes."""
    draws, done = math.prod(shape(start, n)), 0
    if draws:
        flat, width = out.reshape(-1), out.size // draws
        for x0, x1 in [few(key, start, n).T] if draws <= FEW else blocks(key, start, n):
            finish(x0, x1, flat[done * width : (done + len(x0)) * width])
            done += len(x0)
    return torch.from_numpy(out)


def interleave(x0: Words, x1: Words, out: NDArray) -> None:
    out[::2], out[1::2] = x0.view(np.int32), x1.view(np.int32)


def exclusive_or(x0: Words, x1: Words, out: NDArray) -> None:
    np.bitwise_xor(x0, x1, out.view(np.uint32))


def fraction(x0: Words, x1: Words, out: NDArray) -> None:
    np.bitwise_xor(x0, x1, x0)
    np.right_shift(x0, 9, x0)
    np.copyto(out, x0.view(np.int32), casting="same_kind")
    np.multiply(out, np.float32(2**-23), out)


def few(key: Tensor, start: int | Tensor, n: int) -> Words:
    """All words (draws, 2), hashed in Python integers."""
    k0, k1 = key.tolist()
    counts = [first + i for first in read(start).tolist() for i in range(n)]
    return np.array([[word & MASK for word in threefry2x32(k0, k1, count >> 32, count)] for count in counts], np.uint32)


def read(start: int | Tensor) -> NDArray[np.int64]:
    """All starts. To torch.func, numpy() is one more operation to wrap the result of."""
    if not isinstance(start, Tensor):
        return np.array([start], np.int64)
    with temporarily_clear_interpreter_stack():
        return start.numpy().reshape(-1)


def blocks(key: Tensor, start: int | Tensor, n: int) -> Iterator[tuple[Words, Words]]:
    """The words x0, x1 block by block, in buffers that the next block takes over."""
    k0, k1 = key.tolist()
    starts = read(start)
    buffers = np.empty((3, min(BLOCK, len(starts) * n)), np.uint32)
    for counts in counters(starts, n):
        x0, x1, spare = buffers[:, : len(counts)]
        np.copyto(x0, counts >> 32, casting="unsafe")
        np.copyto(x1, counts, casting="unsafe")
        threefry2x32_(k0, k1, x0, x1, spare)
        yield x0, x1


def counters(starts: NDArray, n: int) -> Iterator[NDArray]:
    """starts[:, None] + [0, n), flat, in blocks: some rows whole, or part of one."""
    height, width = max(1, BLOCK // n), min(n, BLOCK)
    for row in range(0, len(starts), height):
        for column in range(0, n, width):
            yield (starts[row : row + height, None] + np.arange(column, min(n, column + width))).reshape(-1)


def threefry2x32_(k0: int, k1: int, x0: Words, x1: Words, spare: Words) -> None:
    """The reference's hash, in place of the counters (x0, x1)."""
    ks = (k0, k1, k0 ^ k1 ^ PARITY)
    x0 += np.uint32(k0 & MASK)
    x1 += np.uint32(k1 & MASK)
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            np.add(x0, x1, x0)
            np.left_shift(x1, r, spare)
            np.right_shift(x1, 32 - r, x1)
            np.bitwise_or(x1, spare, x1)
            np.bitwise_xor(x1, x0, x1)
        x0 += np.uint32(ks[(i + 1) % 3] & MASK)
        x1 += np.uint32(ks[(i + 2) % 3] + i + 1 & MASK)
