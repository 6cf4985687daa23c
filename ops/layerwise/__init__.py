"""LAMB on flat buckets: each segment, a parameter tensor, has a rate of its own, by the norms of it and of its step.

Two passes, 40 bytes a parameter in float32: one makes the moments and sums squares by segment, 24 bytes; one steps, 16. What is
between them is two numbers a segment, which ranks that hold parts of segments add up.
"""
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..op import of_kernel, op
from ..optimizers import Number, aligned, vector, write
from . import cpu, reference

ARGUMENTS = "Tensor numbers, Tensor ends, Tensor? decays"
MOMENTS = op(
    f"lamb_moments(Tensor p, Tensor g, Tensor mu, Tensor nu, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)", reference.lamb_moments,
    of_kernel(__package__, "lamb_moments"), cpu.lamb_moments)
STEP = op(
    f"lamb_step(Tensor p, Tensor mu, Tensor nu, Tensor sums, {ARGUMENTS}, Tensor? key, int start) -> Tensor", reference.lamb_step,
    of_kernel(__package__, "lamb_step"))
Summed = Callable[[Tensor], Tensor]


def lamb(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, *, rate: Number, power1: Number, power2: Number, b1: Number = 0.9,
    b2: Number = 0.999, eps: Number = 1e-6, weight_decay: Number = 0.0, min_ratio: Number = 0.0, max_ratio: Number = math.inf,
    scale: Number = 1.0, ends: Tensor | None = None, decays: Tensor | None = None, key: Tensor | None = None, start: int = 0,
    summed: Summed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LAMB.

        mu = b1 mu + (1 - b1) scale g;    nu = b2 nu + (1 - b2) (scale g)^2
        u = mu / (1 - power1) / (sqrt(nu / (1 - power2)) + eps) + weight_decay decays[s] p
        p = p - rate ratio[s] u,    ratio[s] = norm(p[s]) / norm(u[s]) within [min_ratio, max_ratio], 1 if either norm is 0

    The norm of u is that before its moments are rounded to their dtypes.

    Args:
        p, g, mu, nu, rate, power1, power2, b1, b2, weight_decay, scale, ends, decays, key, start: as for `adamw`. Powers of 0
            correct no bias.
        eps, min_ratio, max_ratio: as for `fspeed.optim.lamb`.
        summed: what makes of this bucket's sums of squares, float32 (segments, 2), of p and of u, those of all ranks' parts: an
            all-reduce.

    Returns:
        New p, mu and nu, in their dtypes.

    Cost: 40 bytes a parameter in float32.

    Source: You et al., arXiv 1904.00962.

    >>> p, zero = torch.tensor([3., 4., 1.]), torch.zeros(3)
    >>> lamb(p, torch.ones(3), zero, zero, rate=.1, power1=.9, power2=.999, ends=torch.tensor([2, 3]))[0]
    tensor([2.6464, 3.6464, 0.9000])
    """
    numbers, ends = _numbers(p, rate, power1, power2, b1, b2, eps, weight_decay, min_ratio, max_ratio, scale), segments(p, ends)
    mu, nu, sums = MOMENTS(p, g, mu, nu, numbers, ends, decays)
    return STEP(p, mu, nu, summed(sums) if summed else sums, numbers, ends, decays, key, aligned(start)), mu, nu


def lamb_(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, *, rate: Number, power1: Number, power2: Number, b1: Number = 0.9,
    b2: Number = 0.999, eps: Number = 1e-6, weight_decay: Number = 0.0, min_ratio: Number = 0.0, max_ratio: Number = math.inf,
    scale: Number = 1.0, ends: Tensor | None = None, decays: Tensor | None = None, key: Tensor | None = None, start: int = 0,
    summed: Summed | None = None, copy: Tensor | None = None,
) -> None:
    """`lamb` that writes over p, mu and nu, which are contiguous, and writes p into `copy` too, in the copy's dtype.

    >>> p, mu, nu = torch.tensor([3., 4.]), torch.zeros(2), torch.zeros(2)
    >>> lamb_(p, torch.ones(2), mu, nu, rate=.1, power1=.9, power2=.999)
    >>> p
    tensor([2.6464, 3.6464])
    """
    numbers, ends = _numbers(p, rate, power1, power2, b1, b2, eps, weight_decay, min_ratio, max_ratio, scale), segments(p, ends)
    sums = write(MOMENTS, (p, g, mu, nu, numbers, ends, decays), (mu, nu))[2]
    write(STEP, (p, mu, nu, summed(sums) if summed else sums, numbers, ends, decays, key, aligned(start)), (p,), copy)


def segments(p: Tensor, ends: Tensor | None) -> Tensor:
    """Where segments end: without any, all is one."""
    return torch.full((1,), p.numel(), dtype=torch.int64, device=p.device) if ends is None else ends


def _numbers(
    p: Tensor, rate: Any, power1: Any, power2: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any, least: Any, most: Any,
    scale: Any,
) -> Tensor:
    root2 = (1 - power2) ** 0.5
    return vector((b1, 1 - b1, b2, 1 - b2, scale, root2 / (1 - power1), eps * root2, weight_decay, rate, least, most), p)
