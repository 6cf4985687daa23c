"""What comes between a block's matrix product and the next block: bias, dropout by key, residual."""
from typing import Any

import torch
from torch import Tensor

from ..op import Paths, of_kernel, op, plain_on_cpu
from . import reference

kernel = lambda name: of_kernel(__package__, name)

BIAS_DROPOUT_RESIDUAL = op(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor residual, Tensor key, Tensor starts, float keep) -> (Tensor, Tensor)",
    reference.bias_dropout_residual, kernel("bias_dropout_residual"), backward=Paths(None, kernel("backward")), saves=1,
    alike={2: ~0})


def bias_dropout_residual(key: Any, x: Tensor, residual: Tensor, rate: float, bias: Tensor | None = None) -> Tensor:
    """A residual and what dropout leaves of x + bias, in one pass.

        residual + fs.random.dropout(key, x + bias, rate)

    Args:
        key: an `fs.random.Key` with one row for each of x's first dim, a raw key, or None, as in `fs.random.dropout`, whose draws
            these are.
        x: (..., n), a floating dtype.
        residual: x's shape, a floating dtype, which may be wider.
        rate: in [0, 1].
        bias: (n,), or None.

    Returns:
        As residual.

    Raises:
        ValueError: rate is out of range, a shape does not fit, or x has not the key's rows.

    Cost: on a GPU x and residual read, the result and a byte written, one hash (117 instructions); backward its gradient and the
        byte read, x's gradient written. The residual's gradient is the result's, not a copy. Kept is the byte.

    >>> import fspeed as fs
    >>> bias_dropout_residual(fs.random.key(42), torch.ones(2, 3), torch.zeros(2, 3), 0.5)
    tensor([[2., 0., 0.],
            [0., 2., 0.]])

    N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15, 2014.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"bias_dropout_residual: rate is a probability, got {rate}")
    if residual.shape != x.shape:
        raise ValueError(f"bias_dropout_residual: residual must have x's shape, {tuple(x.shape)}, got {tuple(residual.shape)}")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias_dropout_residual: bias must have the shape of x's last dim, {tuple(x.shape[-1:])}, "
                         f"got {tuple(bias.shape)}")
    if key is None or rate == 0:
        return (residual + (x if bias is None else x + bias)).to(residual.dtype)
    words, starts = counters(key, x)
    return plain_on_cpu(BIAS_DROPOUT_RESIDUAL)(x, bias, residual, words, starts, 1 - rate)[0]


def counters(key: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The key's words, and the counters at which the draws of its rows start."""
    if isinstance(key, Tensor):
        return key.to(x.device), torch.zeros(1, dtype=torch.int64, device=x.device)
    if x.shape[:1] != key.rows.shape:
        raise ValueError(f"bias_dropout_residual: the key has {len(key.rows)} rows, x has shape {tuple(x.shape)}; x's first dim "
                         "must be these rows")
    return key.data.to(x.device), key.rows.to(x.device) * (x.numel() // max(1, len(x)))
