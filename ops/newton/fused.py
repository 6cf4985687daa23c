"""Newton and Schulz's iteration in three matrix products a step: what is added to a product is read by it."""
from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import scaled


def newton_schulz(x: Tensor, coefficients: Sequence[float], eps: float) -> Tensor:
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    y = scaled(wide, eps).reshape(-1, *wide.shape[-2:]).contiguous()
    for a, b, c in zip(*[iter(coefficients)] * 3, strict=True):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    out = y.reshape(wide.shape)
    return (out if wide is x else out.mT).contiguous()
