"""Norms in plain operations, in float32 or wider. The last results are what a backward saves: they are no functions of x."""
import torch
from torch import Tensor

from ..rowwise import accumulator


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    h = x.to(accumulator(x))
    var, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    y = (h - mean) * rstd * weight
    return (y if bias is None else y + bias).to(x.dtype), mean.detach(), rstd.detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x.to(accumulator(x))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * rstd * weight).to(x.dtype), rstd.detach()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    y, rstd = rms_norm(total, weight, eps)
    return y, total, rstd
