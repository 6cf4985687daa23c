"""Norms in plain operations, in float32 or wider. The last two results are what a backward saves: they have no gradient."""
import torch
from torch import Tensor

from ..rowwise import accumulator


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) rstd weight + bias, the mean (0, if not center) and rstd."""
    h = x.to(accumulator(x))
    mean = h.mean(-1, keepdim=True) if center else torch.zeros_like(h[..., :1])
    h = h - mean if center else h
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = h * rstd * weight
    return (y if bias is None else y + bias).to(x.dtype), mean.detach(), rstd.detach()


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm` of x + residual, with that sum after the first result."""
    total = x + residual
    y, mean, rstd = norm(total, weight, bias, eps, center)
    return y, total, mean, rstd
