"""Rotary embeddings in plain operations, in float32 or wider."""
import torch
from torch import Tensor

from ..rowwise import accumulator


def rotary(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Pairs of x, turned by the table's angles. The table is a constant."""
    cos, sin = table.detach().unbind(-2)
    h = x.to(accumulator(x))
    a, b = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)
