"""Newton and Schulz's iteration in plain tensor operations."""
from collections.abc import Sequence

import torch
from torch import Tensor


def newton_schulz(x: Tensor, coefficients: Sequence[float], eps: float) -> Tensor:
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, coefficients, eps).mT
    y = scaled(x, eps)
    for a, b, c in zip(*[iter(coefficients)] * 3, strict=True):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


def scaled(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x / (norm + eps)).to(x.dtype)
