"""Softmax in plain operations, in float32 or wider."""
import torch
from torch import Tensor

from ..rowwise import accumulator


def softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Over the last dim, where the mask is; 0 elsewhere, and in rows that it leaves nothing of."""
    scores = x.to(accumulator(x)) * scale
    if mask is None:
        return torch.softmax(scores, -1).to(x.dtype)
    hidden = ~mask
    lowest = torch.finfo(scores.dtype).min                  # where all is hidden, infinity would make NaN of the gradients
    return torch.softmax(scores.masked_fill(hidden, lowest), -1).masked_fill(hidden, 0).to(x.dtype)
