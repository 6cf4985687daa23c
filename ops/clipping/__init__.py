"""Unscale, clip and look for what is not finite, in one read of the gradients: the factor goes into the optimizer's own pass."""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..op import of_kernel, op
from . import cpu, reference

SQUARES = op(
    "sum_of_squares(Tensor x) -> Tensor", reference.sum_of_squares, of_kernel(__package__, "sum_of_squares"), cpu.sum_of_squares)


class Clip(NamedTuple):
    """What gradients are to be multiplied by, their norm unscaled, and whether it is finite: scalars on their device."""
    scale: Tensor
    norm: Tensor
    finite: Tensor


def unscale_clip(
    *gs: Tensor, scale: float | Tensor = 1.0, max_norm: float | Tensor = torch.inf,
    summed: Callable[[Tensor], Tensor] | None = None,
) -> Clip:
    """The factor that unscales gradients and clips them to a global norm: an optimizer's `scale`.

        norm = scale sqrt(sum_i g_i^2);    scale min(1, max_norm / norm)

    Args:
        gs: buckets, or gradients, of any shapes.
        scale: what unscales them, positive: 1 over the loss scale and the weight.
        max_norm: the greatest norm.
        summed: what makes of the sum of squares, a scalar, that over all ranks: an all-reduce.

    Returns:
        A `Clip`. Where the norm is inf or NaN its factor is 0 and `finite` is False: keep the old state (0 times inf is NaN).

    Cost: one read of the gradients; nothing waits for the device.

    Source: Pascanu et al., arXiv 1211.5063.

    >>> unscale_clip(torch.tensor([30., 40.]), scale=.1, max_norm=1.)
    Clip(scale=tensor(0.0200), norm=tensor(5.), finite=tensor(True))
    """
    if not gs:
        raise ValueError("unscale_clip got no gradients: give at least one tensor")
    squares = torch.stack([SQUARES(g).to(gs[0].device, gs[0].dtype if gs[0].dtype == torch.float64 else torch.float32) for g in gs])
    total = squares.sum()
    norm = (summed(total) if summed else total).sqrt() * scale
    finite = norm.isfinite()
    by = torch.where(norm <= max_norm, 1, max_norm / torch.where(norm == 0, 1, norm))
    return Clip(torch.where(finite, scale * by, 0), norm, finite)
