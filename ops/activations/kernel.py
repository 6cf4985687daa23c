"""Activations in Triton: each tensor is read once and written once. Rows may lie apart, so halves of a row are read in place."""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpret import on
from ..rowwise import STRIPS, accumulator, patch, rows, wide


def biased(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    y, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    cut = patch(n)
    if x.numel():
        m = x.numel() // n
        on(biased_kernel, x)[(triton.cdiv(m, cut.rows), triton.cdiv(n, cut.block))](
            x.contiguous(), bias.contiguous(), y, m, n, KIND=kind, **wide(x), **cut.options())
    return y


def biased_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, bias, kind = inputs
    dx, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    m, cut = x.numel() // max(n, 1), patch(n)
    columns = triton.cdiv(n, cut.block)
    strips = min(triton.cdiv(STRIPS, max(columns, 1)), triton.cdiv(m, cut.rows))
    db = torch.empty((strips, n), dtype=accumulator(x), device=x.device)
    if x.numel():
        on(biased_backward_kernel, x)[(strips, columns)](
            grads[0].contiguous(), x.contiguous(), bias.contiguous(), dx, db, m, n, KIND=kind, **wide(x), **cut.options())
    return [dx, db.sum(0).to(bias.dtype)]


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(gated_kernel, kind, gate, up, y)
    return y


def gated_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    gate, up, kind = inputs
    dgate, dup = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
    launch(gated_backward_kernel, kind, grads[0], gate, up, dgate, dup)
    return [dgate, dup]


def halves(x: Tensor, kind: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gated(gate, up, kind)


def halves_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, kind = inputs
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(gated_backward_kernel, kind, grads[0], *x.chunk(2, -1), *dx.chunk(2, -1))
    return [dx]


def launch(kernel: Any, kind: str, *xs: Tensor) -> None:
    """Over tensors of one shape, whose rows may lie apart."""
    if xs[0].numel():
        flat = [rows(x) for x in xs]
        m, n = flat[0].shape
        cut = patch(n)
        on(kernel, xs[0])[(triton.cdiv(m, cut.rows), triton.cdiv(n, cut.block))](
            *flat, *[x.stride(0) for x in flat], m, n, KIND=kind, **wide(xs[0]), **cut.options())


@triton.jit
def biased_kernel(
    x, bias, y, M, N, KIND: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at, inside = row * N + i, (row < M) & (i < N)
    u = tl.load(x + at, inside, 0).to(WIDE) + tl.load(bias + i, i < N, 0).to(WIDE)
    tl.store(y + at, activation(u, KIND)[0].to(y.dtype.element_ty), inside)


@triton.jit
def biased_backward_kernel(
    dy, x, bias, dx, db, M, N, KIND: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    strip, strips = tl.program_id(0), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    b = tl.load(bias + i, i < N, 0).to(WIDE)
    total = tl.zeros((ROWS, BLOCK), WIDE)
    for first in range(strip * ROWS, M, strips * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
        at, inside = row * N + i, (row < M) & (i < N)
        u = tl.load(x + at, inside, 0).to(WIDE) + b
        g = tl.load(dy + at, inside, 0).to(WIDE) * activation(u, KIND)[1]
        total += g
        tl.store(dx + at, g.to(dx.dtype.element_ty), inside)
    tl.store(db + strip.to(tl.int64) * N + i, tl.sum(total, 0, keep_dims=True), i < N)


@triton.jit
def gated_kernel(
    gate, up, y, gate_stride, up_stride, y_stride, M, N,
    KIND: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (i < N)
    u, v = tl.load(gate + row * gate_stride + i, inside, 0).to(WIDE), tl.load(up + row * up_stride + i, inside, 0).to(WIDE)
    tl.store(y + row * y_stride + i, (activation(u, KIND)[0] * v).to(y.dtype.element_ty), inside)


@triton.jit
def gated_backward_kernel(
    dy, gate, up, dgate, dup, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, M, N,
    KIND: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (i < N)
    g = tl.load(dy + row * dy_stride + i, inside, 0).to(WIDE)
    u, v = tl.load(gate + row * gate_stride + i, inside, 0).to(WIDE), tl.load(up + row * up_stride + i, inside, 0).to(WIDE)
    value, slope = activation(u, KIND)
    tl.store(dgate + row * dgate_stride + i, (g * v * slope).to(dgate.dtype.element_ty), inside)
    tl.store(dup + row * dup_stride + i, (g * value).to(dup.dtype.element_ty), inside)


@triton.jit
def activation(u, KIND: tl.constexpr):
    """Its value and slope. silu and the tanh form of gelu are both u sigmoid(z(u))."""
    if KIND == "gelu":
        s = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
        slope = s + u * tl.exp(-0.5 * u * u) * 0.3989422804014327
    elif KIND == "silu":
        s = tl.sigmoid(u)
        slope = s + u * s * (1 - s)
    else:
        s = tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))
        slope = s + u * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * u * u)
    return u * s, slope
