"""AdamW with moments of 8 bits in plain tensor operations, in at least float32."""
import torch
from torch import Tensor

from ..compress.reference import by_element, in_blocks
from ..optimizers.reference import each, shrink, stored, wide

BLOCK = 256


def adamw8bit(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, mu_scale: Tensor, nu_scale: Tensor, numbers: Tensor, ends: Tensor | None,
    decays: Tensor | None, key: Tensor | None, start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b1, a1, b2, a2, rate, eps, decay, scale = each(numbers)
    g = scale * wide(g)
    m, n = b1 * mean(mu, wide(mu_scale)) + a1 * g, b2 * square(nu, wide(nu_scale)) + a2 * g * g
    new = shrink(p, decay, ends, decays) * wide(p) - rate * m / (n.sqrt() + eps)
    of_m, of_n = largest(m), largest(n)
    return stored(new, p, key, start), mean_code(m, of_m), square_code(n, of_n), of_m.to(mu_scale.dtype), of_n.to(nu_scale.dtype)


def mean(code: Tensor, scale: Tensor) -> Tensor:
    q = code.to(scale.dtype) * (1 / 127)
    return q * q.abs() * over(scale, code)


def square(code: Tensor, scale: Tensor) -> Tensor:
    q = code.to(scale.dtype) * (1 / 255)
    return q * q * (q * q) * over(scale, code)


def mean_code(m: Tensor, scale: Tensor) -> Tensor:
    q = (m.abs() / divisor(scale, m)).detach().sqrt() * 127
    return (torch.sgn(m.detach()) * rounded(q)).to(torch.int8)


def square_code(n: Tensor, scale: Tensor) -> Tensor:
    """At least 1 where n is not 0, so that no step is divided by eps alone."""
    q = (n / divisor(scale, n)).detach().sqrt().sqrt() * 255
    return torch.where(n.detach() > 0, rounded(q).clamp(min=1), 0).to(torch.uint8)


def rounded(q: Tensor) -> Tensor:
    return torch.where(q.isnan(), 0, q).round()


def largest(x: Tensor) -> Tensor:
    """Of each block; infinite if a number is NaN."""
    return in_blocks(torch.where(x.isnan(), torch.inf, x.abs()), BLOCK).amax(-1)


def divisor(scale: Tensor, like: Tensor) -> Tensor:
    return over(torch.where(scale == 0, 1, scale), like)


def over(scale: Tensor, like: Tensor) -> Tensor:
    return by_element(scale, BLOCK, like.numel()).reshape(like.shape)
