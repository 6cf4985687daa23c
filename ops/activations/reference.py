"""Activations in plain operations: of a sum, of one tensor times another, of one half times the other."""
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, silu

KINDS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda u: gelu(u, approximate="tanh")}


def biased(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """act(x + bias)."""
    return KINDS[kind](x + bias).to(x.dtype)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) up."""
    return KINDS[kind](gate) * up


def halves(x: Tensor, kind: str) -> Tensor:
    """act(x's first half) times its second."""
    gate, up = x.chunk(2, -1)
    return gated(gate, up, kind)
