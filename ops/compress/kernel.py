"""Compression in Triton: a program makes some blocks, each of which it reads once."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import interpreting, on
from ..optimizers.kernel import draws16, elements, fresh, read, wide
from .reference import MOST

CONFIG = dict(num_warps=4)


# ---------------------------------------------------------------- launches
def sign_pack(x: Tensor, error: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    n = x.numel()
    bits = torch.empty(triton.cdiv(n, 8), dtype=torch.uint8, device=x.device)
    scales, (lost,) = scales_of(x, block), fresh(error)
    with torch.cuda.device_of(x):
        launch(sign_pack_kernel, x, block, x.contiguous(), error.contiguous(), bits, scales, lost, n)
    return bits, scales, lost


def sign_unpack(bits: Tensor, scales: Tensor, n: int, block: int) -> Tensor:
    out = torch.empty(n, dtype=torch.promote_types(scales.dtype, torch.float32), device=bits.device)
    with torch.cuda.device_of(bits):
        launch(sign_unpack_kernel, out, block, bits.contiguous(), scales.contiguous(), out, n, bits.shape[-1], scales.shape[-1],
               len(bits))
    return out


def quantise(x: Tensor, key: Tensor | None, start: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    codes = torch.empty(n if bits == 8 else triton.cdiv(n, 2), dtype=torch.int8 if bits == 8 else torch.uint8, device=x.device)
    scales = scales_of(x, block)
    with torch.cuda.device_of(x):
        launch(quantise_kernel, x, block, x.contiguous(), key, codes, scales, start, n, MOST=MOST[bits])
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, n: int, bits: int, block: int) -> Tensor:
    out = torch.empty(n, dtype=torch.promote_types(scales.dtype, torch.float32), device=codes.device)
    with torch.cuda.device_of(codes):
        launch(dequantise_kernel, out, block, codes.contiguous(), scales.contiguous(), out, n, MOST=MOST[bits])
    return out


def scales_of(x: Tensor, block: int) -> Tensor:
    return torch.empty(triton.cdiv(x.numel(), block), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def launch(kernel, like: Tensor, block: int, *args, **constants) -> None:
    n = like.numel()
    if n:
        least = rows(torch.version.hip is not None, block)
        most = max(least, triton.next_power_of_2(triton.cdiv(min(n, 1 << 16), block))) if interpreting() else least
        on(kernel, like)[(triton.cdiv(n, most * block),)](*args, ROWS=most, BLOCK=block, **constants, **CONFIG)


def rows(amd: bool, block: int) -> int:
    """A program's blocks."""
    return max(1, 2 * elements(amd) // block)


# ---------------------------------------------------------------- kernels
@triton.jit
def sign_pack_kernel(x, error, bits, scales, lost, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first, i = places(ROWS, BLOCK)
    B = read(x, i, n) + read(error, i, n)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.minimum(tl.maximum(n - row.to(tl.int64) * BLOCK, 1), BLOCK)
    S = tl.sqrt(tl.sum(tl.reshape(B * B, (ROWS, BLOCK)), 1) / count.to(B.dtype))
    tl.store(scales + row, S, row < tl.cdiv(n, BLOCK))
    tl.store(lost + i, (B - tl.where(B < 0, -1.0, 1.0) * spread(S, ROWS, BLOCK)).to(lost.dtype.element_ty), i < n)
    eights = tl.reshape((B < 0).to(tl.int32), (ROWS * BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    at = first // 8 + tl.arange(0, ROWS * BLOCK // 8)
    tl.store(bits + at, tl.sum(eights, 1).to(tl.uint8), at < tl.cdiv(n, 8))


@triton.jit
def sign_unpack_kernel(bits, scales, out, n, bytes_, blocks, ranks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first, i = places(ROWS, BLOCK)
    at = first // 8 + tl.arange(0, ROWS * BLOCK // 8)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS * BLOCK,), out.dtype.element_ty)
    for rank in range(ranks):
        packed = tl.load(bits + rank * bytes_ + at, at < tl.cdiv(n, 8), 0).to(tl.int32)
        negative = tl.reshape(packed[:, None] >> tl.arange(0, 8)[None, :] & 1, (ROWS * BLOCK,))
        S = spread(wide(tl.load(scales + rank * blocks + row, row < blocks, 0)), ROWS, BLOCK)
        total += tl.where(negative == 1, -S, S)
    tl.store(out + i, total / ranks.to(total.dtype), i < n)


@triton.jit(do_not_specialize=["start"])
def quantise_kernel(x, key, codes, scales, start, n, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first, i = places(ROWS, BLOCK)
    X = read(x, i, n)
    largest = tl.max(tl.reshape(tl.where(X == X, tl.abs(X), float("inf")), (ROWS, BLOCK)), 1)
    row, most = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.full((ROWS,), MOST, X.dtype)
    tl.store(scales + row, divided(largest, most), row < tl.cdiv(n, BLOCK))
    by = tl.where(largest == 0, 0.0, tl.minimum(divided(most, tl.where(largest == 0, 1.0, largest)), 3.4028234663852886e38))
    y = (X * spread(by, ROWS, BLOCK)).to(tl.float32)
    q = nearest(y) if key is None else tl.floor(y + draws16(key, start + first, ROWS * BLOCK).to(tl.float32) * 0.0000152587890625)
    q = tl.where(q == q, tl.minimum(tl.maximum(q, -MOST), MOST), 0.0).to(tl.int32)
    if MOST == 7:
        low, high = tl.split(tl.reshape(q & 15, (ROWS * BLOCK // 2, 2)))
        at = first // 2 + tl.arange(0, ROWS * BLOCK // 2)
        tl.store(codes + at, (low | high << 4).to(tl.uint8), at < tl.cdiv(n, 2))
    else:
        tl.store(codes + i, q.to(tl.int8), i < n)


@triton.jit
def dequantise_kernel(codes, scales, out, n, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first, i = places(ROWS, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    S = spread(wide(tl.load(scales + row, row < tl.cdiv(n, BLOCK), 0)), ROWS, BLOCK)
    if MOST == 7:
        at = first // 2 + tl.arange(0, ROWS * BLOCK // 2)
        pairs = tl.load(codes + at, at < tl.cdiv(n, 2), 0).to(tl.int32)
        q = tl.interleave((pairs & 15 ^ 8) - 8, (pairs >> 4 ^ 8) - 8)
    else:
        q = tl.load(codes + i, i < n, 0)
    tl.store(out + i, q.to(S.dtype) * S, i < n)


# ---------------------------------------------------------------- what they share
@triton.jit
def places(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The place of a program's first element, and of each."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    return first, first + tl.arange(0, ROWS * BLOCK)


@triton.jit
def spread(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A number a block, at each of its elements."""
    return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, BLOCK)), (ROWS * BLOCK,))


@triton.jit
def divided(x, y):
    """Rounded as torch does, where it is float32."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def nearest(x):
    """To an integer, ties to even, of less than 2^22: what 1.5 * 2^23 leaves of it."""
    return (x + 12582912.0) - 12582912.0
