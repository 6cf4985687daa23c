"""Softmax of scores, scaled and masked on the way. Without a mask it is plain on the CPU: blocks are not faster."""
import torch
from torch import Tensor

from ..op import Paths, of_kernel, op, plain_on_cpu
from . import cpu, reference

kernel = lambda name: of_kernel(__package__, name)

SOFTMAX = op(
    "softmax(Tensor x, Tensor? mask, float scale) -> Tensor", reference.softmax, kernel("softmax"), cpu.softmax,
    backward=Paths(cpu.softmax_backward, kernel("softmax_backward")))


def softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.) -> Tensor:
    """Softmax over the last dim of what a mask lets through, scaled before.

        y[i] = m[i] exp(scale x[i]) / sum_j m[j] exp(scale x[j])

    Args:
        x: (..., n), a floating dtype.
        mask: bool, true where x counts; broadcasts to x's shape. None: all counts.
        scale: a number.

    Returns:
        As x; 0 where the mask is false. A row of which nothing counts is 0, and its gradient too.

    Raises:
        ValueError: the mask is not bool, or does not broadcast to x's shape.

    Cost: on a GPU x and the mask are read, not broadcast, and the result written; backward the result and its gradient read and one
        written. Rows of more than 8,192 numbers are read twice. Kept is the result.

    >>> softmax(torch.tensor([[1., 1., 5.], [2., 2., 2.]]), torch.tensor([[True, True, False], [False, False, False]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])

    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
    """
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"softmax: mask must be bool, true where x counts, got {mask.dtype}; add a bias to x")
        if torch.broadcast_shapes(mask.shape, x.shape) != x.shape:
            raise ValueError(f"softmax: mask {tuple(mask.shape)} does not broadcast to x's shape {tuple(x.shape)}")
    return (plain_on_cpu(SOFTMAX) if mask is None else SOFTMAX)(x, mask, scale)
