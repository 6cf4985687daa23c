"""Compression in plain tensor operations: blocks as rows, the last one filled up with zeros."""
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..optimizers.reference import draws16, wide

MOST = {8: 127, 4: 7}           # the largest code: -128 and -8 are not used


def sign_pack(x: Tensor, error: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    b = wide(x) + wide(error)
    rows = in_blocks(b, block)
    counts = in_blocks(torch.ones_like(b), block).sum(-1)
    squares = rows.square().sum(-1) / counts
    scales = torch.where(squares == 0, 0, torch.where(squares == 0, 1, squares).sqrt())
    lost = rows - torch.where(rows < 0, -1, 1) * scales[:, None]
    return packed(in_blocks(b, 8) < 0), scales, lost.reshape(-1)[: x.numel()].reshape(x.shape).to(error.dtype)


def sign_unpack(bits: Tensor, scales: Tensor, n: int, block: int) -> Tensor:
    """The mean over rows."""
    scales = wide(scales)
    one_or_zero = bits[..., None] >> torch.arange(8, device=bits.device) & 1
    signs = 1 - 2 * one_or_zero.reshape(len(bits), -1)[:, :n].to(scales.dtype)
    return (signs * by_element(scales, block, n)).mean(0)


def packed(negative: Tensor) -> Tensor:
    """Eight booleans of a row to a byte, the first in the lowest bit."""
    return (negative.to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=negative.device)).sum(-1, dtype=torch.uint8)


def quantise(x: Tensor, key: Tensor | None, start: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    most, n = MOST[bits], x.numel()
    largest = in_blocks(torch.where(x.isnan(), torch.inf, wide(x).abs()), block).amax(-1)
    y = (wide(x).reshape(-1) * by_element(inverse(largest, most), block, n)).detach().to(torch.float32)
    q = y.round() if key is None else (y + draws16(key, start, n) * 2.0**-16).floor()
    q = torch.where(q.isnan(), 0, q).clamp(-most, most).to(torch.int8)
    return (nibbles(q) if bits == 4 else q), largest / most


def inverse(largest: Tensor, most: int) -> Tensor:
    """most / largest, divided once (a number over a tensor is a reciprocal and a product), 0 over 0, and finite."""
    by = torch.full_like(largest, most) / torch.where(largest == 0, 1, largest)
    return torch.where(largest == 0, 0, by).clamp(max=torch.finfo(torch.float32).max)


def dequantise(codes: Tensor, scales: Tensor, n: int, bits: int, block: int) -> Tensor:
    if bits == 4:
        low, high = codes << 4, codes                                                   # each in the upper half of a byte
        codes = torch.stack([low, high], -1).reshape(-1)[:n].view(torch.int8) >> 4      # which is shifted down with its sign
    return codes.to(wide(scales).dtype) * by_element(wide(scales), block, n)


def nibbles(q: Tensor) -> Tensor:
    """Two codes to a byte, the first in the lower half."""
    pairs = in_blocks(q, 2).view(torch.uint8) & 15
    return pairs[:, 0] | pairs[:, 1] << 4


def in_blocks(x: Tensor, block: int) -> Tensor:
    return pad(x.reshape(-1), (0, -x.numel() % block)).reshape(-1, block)


def by_element(scales: Tensor, block: int, n: int) -> Tensor:
    return scales[..., None].expand(*scales.shape, block).reshape(*scales.shape[:-1], -1)[..., :n]
