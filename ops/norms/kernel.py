"""Norms in Triton: one kernel forward and one backward, for both norms, with and without a sum before.

A row that fits stays in registers: forward reads x once, backward x and dy once. A longer one is read in pieces, twice. Sums over
rows are made in each of STRIPS programs, and then of their results.
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from ..rowwise import STRIPS, accumulator, tile, wide


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> tuple[Tensor, ...]:
    y, _, mean, rstd = forward(x, None, weight, bias, eps, center)
    return y, mean, rstd


def norm_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, weight, bias, _, center = inputs
    _, mean, rstd = outputs
    return backward(grads[0], None, x, weight, bias, mean, rstd, center)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool,
) -> tuple[Tensor, ...]:
    return forward(x, residual, weight, bias, eps, center)


def add_norm_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    _, _, weight, bias, _, center = inputs
    _, total, mean, rstd = outputs
    return backward(grads[0], grads[1], total, weight, bias, mean, rstd, center)


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> tuple[Any, ...]:
    """y, x + residual (None without), mean and 1 / std."""
    new = lambda: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    saved = lambda: torch.empty((*x.shape[:-1], 1), dtype=accumulator(x), device=x.device)
    y, total, mean, rstd = new(), None if residual is None else new(), saved(), saved()
    m, n = rstd.numel(), x.shape[-1]
    cut = tile(n)
    if x.numel():
        on(forward_kernel, x)[(triton.cdiv(m, cut.rows),)](
            *dense(x, residual, weight, bias), y, total, mean, rstd, m, n, eps, CENTER=center, **wide(x), **cut.options())
    return y, total, mean, rstd


def backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, center: bool,
) -> list[Tensor]:
    """The gradients of x, weight and bias, of what was normalized: x. dtotal is x's gradient from elsewhere."""
    m, n = rstd.numel(), x.shape[-1]
    cut = tile(n)
    strips = min(STRIPS, triton.cdiv(m, cut.rows)) if n else 0
    sums = lambda: torch.empty((strips, n), dtype=accumulator(x), device=x.device)
    dx, dw, db = torch.empty(x.shape, dtype=x.dtype, device=x.device), sums(), None if bias is None else sums()
    if strips:
        on(backward_kernel, x)[(strips,)](
            *dense(dy, dtotal, x, weight), mean, rstd, dx, dw, db, m, n, CENTER=center, **wide(x), **cut.options())
    return [dx, dw.sum(0).to(weight.dtype)] + ([] if db is None or bias is None else [db.sum(0).to(bias.dtype)])


def dense(*xs: Tensor | None) -> list[Tensor | None]:
    return [x if x is None else x.contiguous() for x in xs]


@triton.jit
def forward_kernel(
    x, residual, weight, bias, y, total, mean, rstd, M, N, eps,
    CENTER: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        at, inside = row * N + i, (row < M) & (i < N)
        h = added(x, residual, total, at, inside, WIDE)
        mu, squares = moments(h, i < N, N, CENTER)
        r = 1 / tl.sqrt(squares / N + eps)
        tl.store(y + at, scaled((h - mu) * r, weight, bias, i, i < N, WIDE).to(y.dtype.element_ty), inside)
    else:
        mu, squares = tl.zeros((ROWS, 1), WIDE), tl.zeros((ROWS, 1), WIDE)
        for start in range(0, N, BLOCK):
            j = start + i
            h = added(x, residual, total, row * N + j, (row < M) & (j < N), WIDE)
            count = tl.minimum(BLOCK, N - start).to(WIDE)
            mu_, squares_ = moments(h, j < N, count, CENTER)
            share = count / (start + count)                           # Chan's sum of the moments of two parts
            squares += squares_ + (mu_ - mu) * (mu_ - mu) * start * share
            mu += (mu_ - mu) * share
        r = 1 / tl.sqrt(squares / N + eps)
        tl.debug_barrier()                                            # total is read by other threads than those that wrote it
        for start in range(0, N, BLOCK):
            j = start + i
            at, inside = row * N + j, (row < M) & (j < N)
            h = tl.load((x if residual is None else total) + at, inside, 0).to(WIDE)
            tl.store(y + at, scaled((h - mu) * r, weight, bias, j, j < N, WIDE).to(y.dtype.element_ty), inside)
    tl.store(mean + row, mu, row < M)
    tl.store(rstd + row, r, row < M)


@triton.jit
def added(x, residual, total, at, inside, WIDE: tl.constexpr):
    """x, or x + residual as it is rounded where it is stored."""
    h = tl.load(x + at, inside, 0).to(WIDE)
    if residual is not None:
        rounded = (h + tl.load(residual + at, inside, 0).to(WIDE)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, inside)
        h = rounded.to(WIDE)
    return h


@triton.jit
def moments(h, inside, count, CENTER: tl.constexpr):
    """The mean, or 0, and the sum of squares around it."""
    if CENTER:
        mu = tl.sum(h, 1, keep_dims=True) / count
        h = tl.where(inside, h - mu, 0)
    else:
        mu = tl.sum(h, 1, keep_dims=True) * 0
    return mu, tl.sum(h * h, 1, keep_dims=True)


@triton.jit
def scaled(h, weight, bias, i, inside, WIDE: tl.constexpr):
    h = h * tl.load(weight + i, inside, 0).to(WIDE)
    if bias is not None:
        h += tl.load(bias + i, inside, 0).to(WIDE)
    return h


@triton.jit
def backward_kernel(
    dy, dtotal, x, weight, mean, rstd, dx, dw, db, M, N,
    CENTER: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    strip, strips = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)[None, :]
    mine = strip.to(tl.int64) * N + i
    dw_, db_ = tl.zeros((ROWS, BLOCK), WIDE), tl.zeros((ROWS, BLOCK), WIDE)
    for first in range(strip * ROWS, M, strips * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
        r = tl.load(rstd + row, row < M, 0)
        mu = tl.load(mean + row, row < M, 0)
        if WHOLE:
            at, inside = row * N + i, (row < M) & (i < N)
            g, h = loaded(dy, x, mu, r, at, inside, WIDE)
            dw_ += g * h
            if db is not None:
                db_ += g
            g *= tl.load(weight + i, i < N, 0).to(WIDE)
            along = tl.sum(g * h, 1, keep_dims=True) / N
            level = tl.sum(g, 1, keep_dims=True) / N
            pulled(dx, dtotal, g, h, r, along, level, at, inside, CENTER)
        else:
            along, level = r * 0, r * 0
            for start in range(0, N, BLOCK):
                j = start + i
                g, h = loaded(dy, x, mu, r, row * N + j, (row < M) & (j < N), WIDE)
                more = (row > strip * ROWS) & (j < N)                 # a strip's sums are its own, and stay in the L2 cache
                tl.store(dw + mine + start, tl.load(dw + mine + start, more, 0) + g * h, j < N)
                if db is not None:
                    tl.store(db + mine + start, tl.load(db + mine + start, more, 0) + g, j < N)
                g *= tl.load(weight + j, j < N, 0).to(WIDE)
                along += tl.sum(g * h, 1, keep_dims=True) / N
                level += tl.sum(g, 1, keep_dims=True) / N
            tl.debug_barrier()
            for start in range(0, N, BLOCK):
                j = start + i
                at, inside = row * N + j, (row < M) & (j < N)
                g, h = loaded(dy, x, mu, r, at, inside, WIDE)
                g *= tl.load(weight + j, j < N, 0).to(WIDE)
                pulled(dx, dtotal, g, h, r, along, level, at, inside, CENTER)
    if WHOLE:
        tl.store(dw + mine, tl.sum(dw_, 0, keep_dims=True), i < N)
        if db is not None:
            tl.store(db + mine, tl.sum(db_, 0, keep_dims=True), i < N)


@triton.jit
def loaded(dy, x, mu, r, at, inside, WIDE: tl.constexpr):
    """dy and the normalized x."""
    return tl.load(dy + at, inside, 0).to(WIDE), tl.where(inside, (tl.load(x + at, inside, 0).to(WIDE) - mu) * r, 0)


@triton.jit
def pulled(dx, dtotal, g, h, r, along, level, at, inside, CENTER: tl.constexpr):
    """dx = (g - <g, h> h - <g, 1>) / std + dtotal, of g = dy weight and the normalized h."""
    g -= h * along
    if CENTER:
        g -= level
    g *= r
    if dtotal is not None:
        g += tl.load(dtotal + at, inside, 0).to(g.dtype)
    tl.store(dx + at, g.to(dx.dtype.element_ty), inside)
