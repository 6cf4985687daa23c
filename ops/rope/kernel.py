"""Rotary embeddings in Triton: x is read and written once, the table read where it is, by all rows that it is broadcast to."""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from ..rowwise import TILE, leading, wide


def rotary(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    return turned(x, table, interleaved, forward=True)


def rotary_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    _, table, interleaved = inputs
    return [turned(grads[0], table, interleaved, forward=False)]


def turned(x: Tensor, table: Tensor, interleaved: bool, forward: bool) -> Tensor:
    y, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1] // 2
    if x.numel():
        spread = table.contiguous().view(*table.shape[:-2], 2 * n)
        spread, sizes, strides = leading(spread.expand(*x.shape[:-1], 2 * n))
        m, block = x.numel() // (2 * n), max(16, triton.next_power_of_2(n))
        count = max(1, TILE // (2 * block))
        on(kernel, x)[(triton.cdiv(m, count),)](
            x.contiguous(), spread, y, m, n, *sizes[1:], *strides, INTERLEAVED=interleaved, FORWARD=forward, **wide(x), ROWS=count,
            BLOCK=block, num_warps=max(4, 2 * block * count // 512))
    return y


@triton.jit
def kernel(
    x, table, y, M, N, B, C, a_stride, b_stride, c_stride,
    INTERLEAVED: tl.constexpr, FORWARD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (i < N)
    angle = table + row // (B * C) * a_stride + row // C % B * b_stride + row % C * c_stride + i
    cos, sin = tl.load(angle, inside, 0).to(WIDE), tl.load(angle + N, inside, 0).to(WIDE)
    if not FORWARD:
        sin = -sin
    if INTERLEAVED:                                     # read in one piece: two loads of every second number would not be wide
        j = tl.arange(0, 2 * BLOCK)[None, :]
        at, whole = row * 2 * N + j, (row < M) & (j < 2 * N)
        a, b = tl.split(tl.reshape(tl.load(x + at, whole, 0).to(WIDE), (ROWS, BLOCK, 2)))
        out = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (ROWS, 2 * BLOCK))
        tl.store(y + at, out.to(y.dtype.element_ty), whole)
    else:
        at = row * 2 * N + i
        a, b = tl.load(x + at, inside, 0).to(WIDE), tl.load(x + at + N, inside, 0).to(WIDE)
        tl.store(y + at, (a * cos - b * sin).to(y.dtype.element_ty), inside)
        tl.store(y + at + N, (a * sin + b * cos).to(y.dtype.element_ty), inside)
