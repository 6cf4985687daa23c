"""Activations on the CPU, in blocks that stay in the cache, with PyTorch's own slopes."""
from typing import Any

import torch
from torch import Tensor

from ..rowwise import accumulator, blocks
from .reference import KINDS

aten = torch.ops.aten
SLOPES: dict[str, Any] = {
    "silu": aten.silu_backward, "gelu": aten.gelu_backward, "gelu_tanh": lambda g, u: aten.gelu_backward(g, u, approximate="tanh")}


def biased(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    y, bias = torch.empty(x.shape, dtype=x.dtype), bias.to(accumulator(x))
    for u, out in blocks(x, y):
        out.copy_(KINDS[kind](u + bias))
    return y


def biased_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, bias, kind = inputs
    b = bias.to(accumulator(x))
    dx, db = torch.empty(x.shape, dtype=x.dtype), torch.zeros_like(b)
    for g, u, out in blocks(grads[0], x, dx):
        g = SLOPES[kind](g.to(b.dtype), u + b)
        db += g.sum(0)
        out.copy_(g)
    return [dx, db.to(bias.dtype)]


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype)
    for u, v, out in blocks(gate, up, y):
        torch.mul(KINDS[kind](u.to(accumulator(u))), v, out=out)
    return y


def gated_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    gate, up, kind = inputs
    dgate, dup = (torch.empty(x.shape, dtype=x.dtype) for x in (gate, up))
    slopes(kind, grads[0], gate, up, dgate, dup)
    return [dgate, dup]


def halves(x: Tensor, kind: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gated(gate, up, kind)


def halves_backward(grads: Any, inputs: Any, outputs: Any) -> list[Tensor]:
    x, kind = inputs
    dx = torch.empty(x.shape, dtype=x.dtype)
    slopes(kind, grads[0], *x.chunk(2, -1), *dx.chunk(2, -1))
    return [dx]


def slopes(kind: str, dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """dgate = dy up act'(gate), dup = dy act(gate)."""
    for g, u, v, du, dv in blocks(dy, gate, up, dgate, dup):
        g, u = g.to(accumulator(g)), u.to(accumulator(u))
        torch.mul(g, KINDS[kind](u), out=dv)
        du.copy_(SLOPES[kind](g * v, u))
