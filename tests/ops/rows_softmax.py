"""Softmax in the contract table: without a mask, with one of its shape, with one for all rows, which hides the first whole."""
import torch

from fspeed.ops.softmaxes import SOFTMAX


def masked(shape):
    mask = torch.rand(shape) < 0.7
    mask[..., :1] = False
    if len(shape) > 1:
        mask[0] = False
    return torch.randn(shape), mask, 1.7


ROWS = {
    "softmax": (SOFTMAX, lambda shape: (3 * torch.randn(shape), None, 0.3)),
    "softmax, masked": (SOFTMAX, masked),
    "softmax, a mask for all": (SOFTMAX, lambda shape: (torch.randn(shape), torch.rand(shape[-1:]) < 0.7, 1.)),
}
