"""Activations of a feed-forward block: GELU of a sum with a bias, and the gated ones.

On the CPU these are plain operations: forward and backward of 3M numbers on one thread take 11 ms (bias_gelu) and 18 ms (swiglu),
and in blocks that stay in the cache 16 ms and 20 ms.
"""
from torch import Tensor

from ..op import Paths, of_kernel, op, plain_on_cpu
from . import reference

kernel = lambda name: of_kernel(__package__, name)

BIASED = op(
    "biased_activation(Tensor x, Tensor bias, str kind) -> Tensor", reference.biased, kernel("biased"),
    backward=Paths(None, kernel("biased_backward")))
GATED = op(
    "gated_activation(Tensor gate, Tensor up, str kind) -> Tensor", reference.gated, kernel("gated"),
    backward=Paths(None, kernel("gated_backward")))
HALVES = op(
    "gated_activation_halves(Tensor x, str kind) -> Tensor", reference.halves, kernel("halves"),
    backward=Paths(None, kernel("halves_backward")))


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """GELU of a sum, in one pass.

        gelu(x + bias),    gelu(u) = u (1 + erf(u / sqrt(2))) / 2, or with "tanh" u (1 + tanh(sqrt(2 / pi) (u + 0.044715 u**3))) / 2

    Args:
        x: (..., n), a floating dtype.
        bias: (n,), a floating dtype.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.

    Returns:
        As x.

    Raises:
        ValueError: bias is not of shape (n,), or approximate is another word.

    Cost: on a GPU x read and the result written; backward x and its gradient read and one written. Kept is x alone.

    >>> from torch import tensor
    >>> bias_gelu(tensor([[1., 2.]]), tensor([0., -2.]))
    tensor([[0.8413, 0.0000]])

    D. Hendrycks, K. Gimpel, "Gaussian error linear units", arXiv:1606.08415.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias_gelu: bias must have the shape of x's last dim, {tuple(x.shape[-1:])}, got {tuple(bias.shape)}")
    return plain_on_cpu(BIASED)(x, bias, gelu_kind("bias_gelu", approximate))


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """One tensor times the SiLU of another, in one pass.

        silu(gate) up,    silu(u) = u / (1 + exp(-u))

    Args:
        gate: (..., n), a floating dtype; or without `up` (..., 2n), gate and up side by side, as one matrix product makes them.
        up: as gate.

    Returns:
        (..., n), in gate's dtype.

    Raises:
        ValueError: up has not gate's shape and dtype; or the last dim is odd and there is no up.

    Cost: on a GPU both read and the result written; backward three numbers read and two written for each result. Kept are the
        inputs alone.

    >>> from torch import tensor
    >>> swiglu(tensor([[1., 2.]]), tensor([[3., 4.]])), swiglu(tensor([[1., 2., 3., 4.]]))
    (tensor([[2.1932, 7.0464]]), tensor([[2.1932, 7.0464]]))

    N. Shazeer, "GLU variants improve transformer", arXiv:2002.05202.
    """
    return gated("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """One tensor times the GELU of another, in one pass.

        gelu(gate) up

    Args:
        gate, up: as in `swiglu`.
        approximate: as in `bias_gelu`.

    Returns:
        (..., n), in gate's dtype.

    Raises:
        ValueError: as `swiglu`; or approximate is another word.

    Cost: as `swiglu`'s.

    >>> from torch import tensor
    >>> geglu(tensor([[1., 2., 3., 4.]]))
    tensor([[2.5240, 7.8180]])

    N. Shazeer, "GLU variants improve transformer", arXiv:2002.05202.
    """
    return gated("geglu", gate, up, gelu_kind("geglu", approximate))


def gated(name: str, gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"{name}: without up the last dim holds both halves and must be even, got shape {tuple(gate.shape)}")
        return plain_on_cpu(HALVES)(gate, kind)
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"{name}: up must be as gate, {tuple(gate.shape)} {gate.dtype}, got {tuple(up.shape)} {up.dtype}; expand or cast it")
    return plain_on_cpu(GATED)(gate, up, kind)


def gelu_kind(name: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{name}: approximate is "none" or "tanh", got {approximate!r}')
    return "gelu_tanh" if approximate == "tanh" else "gelu"
