"""Newton and Schulz's iteration, by which Muon brings the singular values of its updates near 1."""
from collections.abc import Sequence

from torch import Tensor

from ..op import op
from . import fused, reference

ITERATION = op(
    "newton_schulz(Tensor x, float[] coefficients, float eps) -> Tensor", reference.newton_schulz, fused.newton_schulz,
    fused.newton_schulz)
STANDARD = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    x: Tensor, coefficients: Sequence[float] | Sequence[Sequence[float]] = STANDARD, steps: int = 5, eps: float = 1e-8,
) -> Tensor:
    """Matrices with their singular values brought near 1.

        x = x / (norm(x) + eps), then steps times: x = a x + (b A + c A A) x,    A = x x^T

    Args:
        x: (..., rows, columns), in the dtype that is computed in.
        coefficients: (a, b, c), or one such row a step, which then count the steps.
        steps: how many.
        eps: what is added to Frobenius' norm.

    Returns:
        (..., rows, columns).

    Raises:
        ValueError: coefficients of another shape, or x is no matrix.

    Cost: for n by m, n < m, about 4 n^2 m + 2 n^3 multiplications a step, in three matrix products into which sums are fused: a
        pass over two matrices less than plainly, 11% to 16% of the time on one core.

    Source: Jordan et al., kellerjordan.github.io/posts/muon.

    >>> import torch
    >>> newton_schulz(torch.tensor([[3., 0.], [0., 4.]])).round(decimals=1)
    tensor([[0.7000, 0.0000],
            [0.0000, 1.1000]])
    """
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in coefficients]
    flat = [float(number) for row in rows for number in row]
    one = all(len(row) == 1 for row in rows)
    if x.dim() < 2 or len(flat) % 3 or not flat or (one and len(flat) != 3) or not (one or all(len(row) == 3 for row in rows)):
        shape = tuple(x.shape)
        raise ValueError(f"newton_schulz takes matrices and (a, b, c), or rows of them: got shape {shape} and {coefficients}")
    return ITERATION(x, flat * steps if one else flat, eps)
