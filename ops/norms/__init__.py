"""Norms over the last dim, with sums in float32 or wider."""
from torch import Tensor

from ..op import Paths, of_kernel, op
from . import cpu, reference

kernel = lambda name: of_kernel(__package__, name)

LAYER_NORM = op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)", reference.layer_norm,
    kernel("layer_norm"), cpu.layer_norm, backward=Paths(cpu.layer_norm_backward, kernel("layer_norm_backward")), saves=2)
RMS_NORM = op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", reference.rms_norm,
    kernel("rms_norm"), cpu.rms_norm, backward=Paths(cpu.rms_norm_backward, kernel("rms_norm_backward")), saves=1)
ADD_RMS_NORM = op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)", reference.add_rms_norm,
    kernel("add_rms_norm"), cpu.add_rms_norm, backward=Paths(cpu.add_rms_norm_backward, kernel("add_rms_norm_backward")), saves=1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Each row with its mean taken off, divided by its standard deviation, scaled and shifted.

        (x - mean(x)) / sqrt(var(x) + eps) weight + bias

    Args:
        x: (..., n), a floating dtype.
        weight, bias: (n,).
        eps: > 0, keeps constant rows finite.

    Returns:
        As x.

    Raises:
        ValueError: weight or bias is not of shape (n,).

    Cost: on a GPU x read and the result written, backward x and its gradient read and one written, for rows up to 8,192 numbers
    (longer ones are read twice); 8 bytes a row are kept beside the inputs.

    >>> layer_norm(torch.tensor([[1., 2., 3.]]), torch.ones(3), torch.zeros(3))
    tensor([[-1.2247,  0.0000,  1.2247]])

    J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer normalization", arXiv:1607.06450.
    """
    check("layer_norm", x, weight=weight, bias=bias)
    return LAYER_NORM(x, weight, bias, eps)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Each row divided by the root of its mean square, and scaled.

        x / sqrt(mean(x**2) + eps) weight    or, with a residual, that of x + residual, and x + residual

    Args:
        x: (..., n), a floating dtype.
        weight: (n,).
        eps: > 0, keeps zero rows finite.
        residual: as x, or None.

    Returns:
        As x; with a residual, two of them: what is normalized, and the sum that it was made of, in x's dtype.

    Raises:
        ValueError: weight is not of shape (n,), or residual not of x's shape and dtype.

    Cost: as layer_norm's; with a residual one more read and write forward, and one more read backward.

    >>> rms_norm(torch.tensor([[3., 4.]]), torch.ones(2), 0.)
    tensor([[0.8485, 1.1314]])
    >>> rms_norm(torch.tensor([[1., 2.]]), torch.ones(2), 0., residual=torch.tensor([[2., 2.]]))[1]
    tensor([[3., 4.]])

    B. Zhang, R. Sennrich, "Root mean square layer normalization", arXiv:1910.07467.
    """
    check("rms_norm", x, weight=weight)
    if residual is None:
        return RMS_NORM(x, weight, eps)[0]
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: residual must be as x, {tuple(x.shape)} {x.dtype}, got {tuple(residual.shape)} {residual.dtype}; expand it")
    return ADD_RMS_NORM(x, residual, weight, eps)[:2]


def check(name: str, x: Tensor, **rows: Tensor | None) -> None:
    for what, row in rows.items():
        if row is not None and row.shape != x.shape[-1:]:
            raise ValueError(f"{name}: {what} must have the shape of x's last dim, {tuple(x.shape[-1:])}, got {tuple(row.shape)}")
