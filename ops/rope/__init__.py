"""Rotary position embeddings, in both of their conventions, from a table of positions."""
import torch
from torch import Tensor

from ..op import Paths, of_kernel, op, plain_on_cpu
from . import reference

kernel = lambda name: of_kernel(__package__, name)

ROTARY = op(
    "rotary(Tensor x, Tensor table, bool interleaved) -> Tensor", reference.rotary, kernel("rotary"),
    backward=Paths(None, kernel("rotary_backward")), alike={1: None})


def rotary_table(
    positions: Tensor, dim: int, base: float = 10_000., frequencies: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The cosines and sines that `rotary` takes, of every position.

        cos(p f[i]), sin(p f[i]),    f[i] = base**(-2 i / dim) for i < dim / 2

    Args:
        positions: (...), integers or floats: gaps, restarts in packed sequences and interpolation are all numbers here.
        dim: of a head, even.
        base: > 1.
        frequencies: (dim / 2,), in place of base's, as models with longer contexts rescale them.
        dtype: of the result; angles are computed in float64, so that they are right at any position.

    Returns:
        (..., 2, dim / 2).

    Raises:
        ValueError: dim is odd, or frequencies are not of shape (dim / 2,).

    Cost: dim numbers a position in float64, once for all layers.

    >>> rotary_table(torch.tensor([0, 1]), 4)
    tensor([[[1.0000, 1.0000],
             [0.0000, 0.0000]],
    <BLANKLINE>
            [[0.5403, 0.9999],
             [0.8415, 0.0100]]])
    """
    if dim % 2 or (frequencies is not None and frequencies.shape != (dim // 2,)):
        got = "" if frequencies is None else f", frequencies of shape {tuple(frequencies.shape)}"
        raise ValueError(f"rotary_table: dim must be even, and frequencies of shape (dim / 2,); got dim {dim}{got}")
    if frequencies is None:
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.to(torch.float64)[..., None] * frequencies.to(torch.float64)
    return torch.stack((angles.cos(), angles.sin()), -2).to(dtype)


def rotary(x: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair of numbers in a head turned by its position's angle, so that products of two heads see the distance alone.

        a cos - b sin, a sin + b cos

    Args:
        x: (..., dim), a floating dtype; dim is even.
        table: (..., 2, dim / 2), of `rotary_table`; what is before broadcasts to x's without its last dim: for x of (batch, heads,
            tokens, dim) and positions of (tokens,) as it is, for (batch, tokens, heads, dim) from `positions[:, None]`. A constant:
            it has no gradient.
        interleaved: whether a pair is two neighbours, as in the paper and GPT-J, or x[i] and x[i + dim / 2], as in GPT-NeoX, LLaMA.

    Returns:
        As x.

    Raises:
        ValueError: the table does not fit x.

    Cost: on a GPU x read and the result written, and the table, which stays in the cache; the same backward. On the CPU plain
        operations.

    >>> table = rotary_table(torch.tensor([0., torch.pi / 2]), 2)
    >>> rotary(torch.tensor([[1., 2.], [1., 2.]]), table)
    tensor([[ 1.0000,  2.0000],
            [-2.0000,  1.0000]])

    J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv:2104.09864.
    """
    shape = (*x.shape[:-1], 2, x.shape[-1] // 2)
    fits = x.shape[-1] % 2 == 0 and table.dim() >= 2 and table.dim() <= len(shape) and table.shape[-2:] == shape[-2:] and all(
        have in (1, want) for have, want in zip(reversed(table.shape[:-2]), reversed(shape[:-2]), strict=False))
    if not fits:
        raise ValueError(f"rotary: for x of shape {tuple(x.shape)} the table must broadcast to {shape}, got {tuple(table.shape)}")
    return plain_on_cpu(ROTARY)(x, table.detach(), interleaved)
