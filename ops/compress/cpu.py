"""Compression on the CPU, in parts that the cache holds, with numpy's packing of bits.

In float32, against plain operations, ns an element: sign_pack 3.3 against 17.6, sign_unpack 5.8 against 20, quantise 3.2 against
21, and by a key 10.9 against 45. Plain dequantise takes 2.4.
"""
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..threefry.cpu import pairs
from .reference import MOST, in_blocks, inverse, nibbles, wide

PART = 2**15            # all blocks divide it


def sign_pack(x: Tensor, error: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    n, dtype = x.numel(), torch.promote_types(wide(x).dtype, error.dtype)
    bits, scales = torch.empty(-(-n // 8), dtype=torch.uint8), torch.empty(-(-n // block), dtype=dtype)
    lost, x, old = torch.empty(n, dtype=error.dtype), x.reshape(-1), error.reshape(-1)
    for at in parts(n):
        b = (wide(x[at]) + old[at]).to(dtype).add_(0.0)                      # -0 is 0
        bits[at.start // 8 : -(-at.stop // 8)] = torch.from_numpy(np.packbits(np.signbit(b.numpy()), bitorder="little"))
        rows = in_blocks(b, block)
        scale = torch.linalg.vector_norm(rows, dim=-1).mul_(block**-0.5)
        if short := -len(b) % block:
            scale[-1] *= (block / (block - short)) ** 0.5
        scales[at.start // block : -(-at.stop // block)] = scale
        lost[at] = rows.sub(torch.copysign(scale[:, None], rows)).view(-1)[: len(b)]
    return bits, scales, lost.view(error.shape)


def sign_unpack(bits: Tensor, scales: Tensor, n: int, block: int) -> Tensor:
    scales = wide(scales)
    total = torch.zeros(scales.shape[-1] * block, dtype=scales.dtype).view(-1, block)
    for packed, scale in zip(bits, scales, strict=True):
        ones = torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), count=n, bitorder="little"))
        total += in_blocks(ones.to(scales.dtype), block).mul_(-2).add_(1).mul_(scale[:, None])
    return total.view(-1)[:n] / len(bits)


def quantise(x: Tensor, key: Tensor | None, start: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    n, most = x.numel(), MOST[bits]
    codes, scales = torch.empty(n, dtype=torch.int8), torch.empty(-(-n // block), dtype=wide(x[:0]).dtype)
    x = x.reshape(-1)
    for at in parts(n):
        rows = in_blocks(wide(x[at]), block)
        largest = torch.maximum(rows.amax(-1), rows.amin(-1).neg())
        largest = torch.where(largest.isnan(), torch.inf, largest)
        scales[at.start // block : -(-at.stop // block)] = largest / most
        y = (rows * inverse(largest, most)[:, None]).view(-1)[: at.stop - at.start].to(torch.float32)
        q = y.round_() if key is None else y.add_(draws(key, start + at.start, len(y))).floor_()
        if largest.isinf().any():
            q.nan_to_num_(0)
        codes[at] = q.clamp_(-most, most)
    return (nibbles(codes) if bits == 4 else codes), scales


def draws(key: Tensor, start: int, n: int) -> Tensor:
    """Multiples of 2^-16 in [0, 1): `draws16`, where 4 divides start."""
    halves = pairs(key, start // 4, -(-n // 4)).numpy().reshape(-1).view(np.uint16)[:n]     # the lower half of a word comes first
    return torch.from_numpy(halves.astype(np.float32)).mul_(2.0**-16)


def parts(n: int) -> Iterator[slice]:
    return (slice(at, min(at + PART, n)) for at in range(0, n, PART))
