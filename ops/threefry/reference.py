"""Threefry2x32 in plain tensor operations: what traces, batches and any device see, and what the other paths must equal."""
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", Tensor, int)

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def pairs(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return torch.stack(words(key, start, n), -1)


def bits(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    x0, x1 = words(key, start, n)
    return x0 ^ x1


def uniform(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    return (bits(key, start, n) >> 9 & (1 << 23) - 1).to(torch.float32) * 2.0**-23


def words(key: Tensor, start: int | Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Both 32-bit words at the counters start + [0, n)."""
    first = start[..., None] if isinstance(start, Tensor) else start
    counts = first + torch.arange(n, dtype=torch.int64, device=key.device)
    return threefry2x32(key[0], key[1], (counts >> 32).to(torch.int32), counts.to(torch.int32))


def threefry2x32(k0: Word, k1: Word, x0: Word, x1: Word) -> tuple[Word, Word]:
    """The hash of the counter (x0, x1) under the key (k0, k1): 20 rounds of add, rotate, xor.

    In int32 tensors, whose sums wrap as uint32's do; or in Python integers, of whose results the low 32 bits count.
    """
    ks = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = x0 + k0, x1 + k1
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << r | x1 >> 32 - r & (1 << r) - 1) ^ x0              # the mask makes the right shift a logical one
        x0, x1 = x0 + ks[(i + 1) % 3], x1 + (ks[(i + 2) % 3] + (i + 1))
    return x0, x1
