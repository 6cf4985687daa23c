"""LAMB in plain tensor operations, in at least float32."""
import torch
from torch import Tensor

from ..optimizers.reference import each, of_segment, segments, stored, wide


def lamb_moments(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, numbers: Tensor, ends: Tensor, decays: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    b1, a1, b2, a2, scale = each(numbers)[:5]
    g = scale * wide(g)
    m, n = b1 * wide(mu) + a1 * g, b2 * wide(nu) + a2 * g * g
    u, at = direction(p, m, n, numbers, ends, decays), segments(ends, p).reshape(-1)
    squares = torch.stack([wide(p) ** 2, u**2], -1).reshape(-1, 2)
    return m.to(mu.dtype), n.to(nu.dtype), squares.new_zeros(len(ends), 2).index_add(0, at, squares)


def lamb_step(
    p: Tensor, mu: Tensor, nu: Tensor, sums: Tensor, numbers: Tensor, ends: Tensor, decays: Tensor | None, key: Tensor | None,
    start: int,
) -> Tensor:
    (rate, least, most), sums = each(numbers)[8:], wide(sums)
    moved = (sums == 0).any(-1)
    of_p, of_u = torch.where(moved[:, None], 1, sums).sqrt().unbind(-1)
    ratio = torch.where(moved, 1, torch.minimum(torch.maximum(of_p / of_u, least), most))
    new = wide(p) - rate * of_segment(ends, ratio, p) * direction(p, mu, nu, numbers, ends, decays)
    return stored(new, p, key, start)


def direction(p: Tensor, mu: Tensor, nu: Tensor, numbers: Tensor, ends: Tensor, decays: Tensor | None) -> Tensor:
    by, eps, decay = each(numbers)[5:8]
    decay = decay if decays is None else decay * of_segment(ends, decays, p)
    return by * wide(mu) / (wide(nu).sqrt() + eps) + decay * wide(p)
