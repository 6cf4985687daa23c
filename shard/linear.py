"""A linear function of one tensor, made differentiable by its transpose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def linear(x: Tensor, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]) -> Tensor:
    """forward(x), whose jvp is forward(tangent) and whose vjp is transpose(cotangent), so at all orders and under vmap.

    Args:
        x: any shape and dtype.
        forward: a linear function that indexes dims from the front and acts alike on each slice of a dim added at the end.
        transpose: its transpose, of the same kind: <c, forward(t)> = <transpose(c), t>.

    Returns: forward(x).
    Cost: one forward or transpose for each evaluation; nothing is saved for backward.

    >>> linear(torch.ones(2), lambda x: 3 * x, lambda c: 3 * c)
    tensor([3., 3.])
    """
    return Linear.apply(x, forward, transpose)


class Linear(torch.autograd.Function):
    """Backward and jvp are again this function, so every order of derivative follows."""

    @staticmethod
    def forward(x: Tensor, forward: Callable, transpose: Callable) -> Tensor:  # type: ignore[override]
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.linear, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:  # type: ignore[override]
        return Linear.apply(cotangent, ctx.transpose, ctx.linear), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return Linear.apply(tangent, ctx.linear, ctx.transpose)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, forward: Callable, transpose: Callable) -> tuple[Tensor, int]:
        return Linear.apply(x.movedim(in_dims[0], -1), forward, transpose), -1
