"""Norms over the last dim, with sums in float32 or wider, and the residual added on the way."""
from torch import Tensor

from ..op import Paths, of_kernel, op
from . import cpu, reference

kernel = lambda name: of_kernel(__package__, name)

NORM = op(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool center) -> (Tensor, Tensor, Tensor)", reference.norm,
    kernel("norm"), cpu.norm, backward=Paths(cpu.norm_backward, kernel("norm_backward")), saves=2)
ADD_NORM = op(
    "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool center) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.add_norm, kernel("add_norm"), cpu.add_norm,
    backward=Paths(cpu.add_norm_backward, kernel("add_norm_backward")), saves=2, alike={1: 0})


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each row with its mean taken off, divided by its standard deviation, scaled and shifted.

        (x - mean(x)) / sqrt(var(x) + eps) weight + bias    or, with a residual, that of x + residual, and x + residual

    Args:
        x: (..., n), a floating dtype.
        weight, bias: (n,), a floating dtype; no bias if None.
        eps: > 0, keeps constant rows finite.
        residual: as x, or None.

    Returns:
        As x; with a residual, two of them: what is normalized, and the sum that it was made of.

    Raises:
        ValueError: weight or bias is not of shape (n,), or residual not of x's shape and dtype.

    Cost: on a GPU x is read and the result written, backward x and its gradient read and one written; a residual adds a read and
        a write forward, and a read backward. Rows of more than 8,192 numbers are read twice. 8 bytes a row are kept.

    >>> from torch import ones, tensor
    >>> layer_norm(tensor([[1., 2., 3.]]), ones(3))
    tensor([[-1.2247,  0.0000,  1.2247]])

    J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer normalization", arXiv:1607.06450.
    """
    return norm("layer_norm", x, weight, bias, eps, residual, center=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Each row divided by the root of its mean square, and scaled.

        x / sqrt(mean(x**2) + eps) weight    or, with a residual, that of x + residual, and x + residual

    Args:
        x: (..., n), a floating dtype.
        weight: (n,), a floating dtype.
        eps: > 0, keeps zero rows finite.
        residual: as x, or None.

    Returns:
        As x; with a residual, two of them: what is normalized, and the sum that it was made of.

    Raises:
        ValueError: weight is not of shape (n,), or residual not of x's shape and dtype.

    Cost: as layer_norm's.

    >>> from torch import ones, tensor
    >>> rms_norm(tensor([[3., 4.]]), ones(2), 0.)
    tensor([[0.8485, 1.1314]])
    >>> rms_norm(tensor([[1., 2.]]), ones(2), 0., residual=tensor([[2., 2.]]))[1]
    tensor([[3., 4.]])

    B. Zhang, R. Sennrich, "Root mean square layer normalization", arXiv:1910.07467.
    """
    return norm("rms_norm", x, weight, None, eps, residual, center=False)


def norm(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, center: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    for what, row in {"weight": weight, "bias": bias}.items():
        if row is not None and row.shape != x.shape[-1:]:
            raise ValueError(f"{name}: {what} must have the shape of x's last dim, {tuple(x.shape[-1:])}, got {tuple(row.shape)}")
    if residual is None:
        return NORM(x, weight, bias, eps, center)[0]
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"{name}: residual must be as x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; expand or cast it")
    return ADD_NORM(x, residual, weight, bias, eps, center)[:2]
