"""Bias, dropout and residual in Triton: draws are made in registers, by the hash of `ops.threefry`; what is kept takes a byte.

To hash again in backward would take longer than to read that byte: 117 instructions a number.
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from ..rowwise import STRIPS, accumulator, patch, wide
from ..threefry.kernel import threefry2x32


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, key: Tensor, starts: Tensor, keep: float,
) -> tuple[Tensor, Tensor]:
    y, kept = (torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (residual.dtype, torch.bool))
    if x.numel():
        n = x.shape[-1]
        m, cut = x.numel() // n, patch(n)
        each = starts.numel() > m                       # a vector whose numbers are the key's rows
        tensors = [t if t is None else t.contiguous() for t in (x, bias, residual, key, starts)]
        on(forward_kernel, x)[(triton.cdiv(m, cut.rows), triton.cdiv(n, cut.block))](
            *tensors, y, kept.view(torch.uint8), m, n, 1 if each else m // starts.numel(), keep, EACH=each, **wide(x),
            **cut.options())
    return y, kept


def backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, bias, _, _, _, keep = inputs
    dx, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    m, cut = x.numel() // max(n, 1), patch(n)
    columns = triton.cdiv(n, cut.block)
    strips = triton.cdiv(m, cut.rows)
    db = None
    if bias is not None:
        strips = min(triton.cdiv(STRIPS, max(columns, 1)), strips)
        db = torch.empty((strips, n), dtype=accumulator(x), device=x.device)
    if x.numel():
        on(backward_kernel, x)[(strips, columns)](
            grads[0].contiguous(), outputs[1].contiguous().view(torch.uint8), dx, db, m, n, keep, **wide(x), **cut.options())
    return [dx] if db is None or bias is None else [dx, db.sum(0).to(bias.dtype)]


@triton.jit
def forward_kernel(
    x, bias, residual, key, starts, y, kept, M, N, PART, keep,
    EACH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """A key's row is PART rows of x; or, if EACH, one number."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at, inside = row * N + i, (row < M) & (i < N)
    part = tl.load(starts + row // PART, row < M, 0) + row % PART * N + i
    count = tl.load(starts + at, inside, 0) if EACH else part
    k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    x0, x1 = threefry2x32(k0, k1, (count >> 32).to(tl.uint32), count.to(tl.uint32))
    stays = ((x0 ^ x1) >> 9).to(tl.float32) * 2**-23 < keep
    h = tl.load(x + at, inside, 0).to(WIDE)
    if bias is not None:
        h += tl.load(bias + i, i < N, 0).to(WIDE)
    h = tl.load(residual + at, inside, 0).to(WIDE) + tl.where(stays, h / (keep if keep > 0 else 1.0), 0)
    tl.store(y + at, h.to(y.dtype.element_ty), inside)
    tl.store(kept + at, stays.to(tl.uint8), inside)


@triton.jit
def backward_kernel(
    dy, kept, dx, db, M, N, keep, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    strip, strips = tl.program_id(0), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), WIDE)
    for first in range(strip * ROWS, M, strips * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
        at, inside = row * N + i, (row < M) & (i < N)
        g = tl.load(dy + at, inside, 0).to(WIDE) / (keep if keep > 0 else 1.0)
        g = tl.where(tl.load(kept + at, inside, 0) != 0, g, 0)
        if db is not None:
            total += g
        tl.store(dx + at, g.to(dx.dtype.element_ty), inside)
    if db is not None:
        tl.store(db + strip.to(tl.int64) * N + i, tl.sum(total, 0, keep_dims=True), i < N)
