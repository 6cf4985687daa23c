"""Activations in plain operations, in float32 or wider: of a sum, of one tensor times another, of one half times the other."""
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, silu

from ..rowwise import accumulator

KINDS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda u: gelu(u, approximate="tanh")}


def biased(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """act(x + bias)."""
    return KINDS[kind](x.to(accumulator(x)) + bias).to(x.dtype)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) up."""
    return (KINDS[kind](gate.to(accumulator(gate))) * up).to(gate.dtype)


def halves(x: Tensor, kind: str) -> Tensor:
    """act(x's first half) times its second."""
    gate, up = x.chunk(2, -1)
    return gated(gate, up, kind)
