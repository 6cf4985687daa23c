"""Softmax in Triton: a row that fits stays in registers, so each tensor is read once; a longer one is read in pieces, twice.

A mask is read where it is: rows that it is broadcast to share its memory.
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from ..rowwise import leading, tile, wide


def softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    y, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    if x.numel():
        m, cut = x.numel() // n, tile(n)
        bits, places = seen(mask, x)
        on(forward_kernel, x)[(triton.cdiv(m, cut.rows),)](
            x.contiguous(), bits, y, m, n, *places, scale, **wide(x), **cut.options())
    return y


def softmax_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, _, scale = inputs
    dx, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    if x.numel():
        m, cut = x.numel() // n, tile(n)
        on(backward_kernel, x)[(triton.cdiv(m, cut.rows),)](
            grads[0].contiguous(), outputs[0].contiguous(), dx, m, n, scale, **wide(x), **cut.options())
    return [dx]


def seen(mask: Tensor | None, x: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """The mask in bytes, and the sizes and strides that lead to the row of it that each row of x has."""
    if mask is None:
        return None, (1, 1, 0, 0, 0, 0)
    spread, sizes, strides = leading(mask.view(torch.uint8).expand(x.shape))
    return spread, (*sizes[1:], *strides, spread.stride(-1))


@triton.jit
def forward_kernel(
    x, mask, y, M, N, B, C, a_stride, b_stride, c_stride, mask_stride, scale,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    if mask is not None:
        mask += row // (B * C) * a_stride + row // C % B * b_stride + row % C * c_stride
    if WHOLE:
        inside = (row < M) & (i < N)
        s = scores(x + row * N + i, mask, i * mask_stride, inside, scale, WIDE)
        e = tl.exp(s - finite(tl.max(s, 1, keep_dims=True)))
        total = tl.sum(e, 1, keep_dims=True)
        tl.store(y + row * N + i, (e / tl.where(total > 0, total, 1)).to(y.dtype.element_ty), inside)
    else:
        top, total = tl.full((ROWS, 1), float("-inf"), WIDE), tl.zeros((ROWS, 1), WIDE)
        for start in range(0, N, BLOCK):
            j = start + i
            s = scores(x + row * N + j, mask, j * mask_stride, (row < M) & (j < N), scale, WIDE)
            higher = tl.maximum(top, tl.max(s, 1, keep_dims=True))
            total = total * tl.exp(top - finite(higher)) + tl.sum(tl.exp(s - finite(higher)), 1, keep_dims=True)
            top = higher
        for start in range(0, N, BLOCK):
            j = start + i
            inside = (row < M) & (j < N)
            e = tl.exp(scores(x + row * N + j, mask, j * mask_stride, inside, scale, WIDE) - finite(top))
            tl.store(y + row * N + j, (e / tl.where(total > 0, total, 1)).to(y.dtype.element_ty), inside)


@triton.jit
def scores(x, mask, at, inside, scale, WIDE: tl.constexpr):
    s = tl.load(x, inside, 0).to(WIDE) * scale          # masked or not: loads are wide where their condition is simple
    if mask is not None:
        inside &= tl.load(mask + at, inside, 0) != 0
    return tl.where(inside, s, float("-inf"))


@triton.jit
def finite(top):
    """The largest score, 0 if there is none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def backward_kernel(
    dy, y, dx, M, N, scale, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    """dx = scale y (dy - <dy, y>)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        at, inside = row * N + i, (row < M) & (i < N)
        g, p = tl.load(dy + at, inside, 0).to(WIDE), tl.load(y + at, inside, 0).to(WIDE)
        along = tl.sum(g * p, 1, keep_dims=True)
        tl.store(dx + at, (scale * p * (g - along)).to(dx.dtype.element_ty), inside)
    else:
        along = tl.zeros((ROWS, 1), WIDE)
        for start in range(0, N, BLOCK):
            at, inside = row * N + start + i, (row < M) & (start + i < N)
            along += tl.sum(tl.load(dy + at, inside, 0).to(WIDE) * tl.load(y + at, inside, 0).to(WIDE), 1, keep_dims=True)
        for start in range(0, N, BLOCK):
            at, inside = row * N + start + i, (row < M) & (start + i < N)
            g, p = tl.load(dy + at, inside, 0).to(WIDE), tl.load(y + at, inside, 0).to(WIDE)
            tl.store(dx + at, (scale * p * (g - along)).to(dx.dtype.element_ty), inside)
