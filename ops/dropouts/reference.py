"""Bias, dropout and residual in plain operations. The last result is what a backward saves: which numbers were kept."""
import torch
from torch import Tensor

from ..threefry import threefry_uniform


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, key: Tensor, starts: Tensor, keep: float,
) -> tuple[Tensor, Tensor]:
    """residual + where(kept, x + bias, 0) / keep; the draws of starts[i] are for an equal part of x each."""
    u = threefry_uniform(key, starts, x.numel() // max(1, starts.numel()))
    kept = u.reshape(x.shape) < keep
    h = x if bias is None else x + bias
    return (residual + torch.where(kept, h, 0) / (keep or 1.)).to(residual.dtype), kept
