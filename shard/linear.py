"""A linear function of one tensor, made differentiable by its transpose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def linear(x: Tensor, forward: Callable[..., Tensor], transpose: Callable[..., Tensor], *constants: Tensor) -> Tensor:
    """forward(x, *constants), whose jvp is forward(tangent) and whose vjp is transpose(cotangent), so at all orders and under vmap.

    Args:
        x: any shape and dtype.
        forward: linear in x. It indexes dims from the front, and acts alike on each slice of a dim added at the end of all its
            arguments (of size 1 in some, as broadcasting has it).
        transpose: its transpose in x, of the same kind: <c, forward(t)> = <transpose(c), t>.
        constants: what else both take; no derivative is taken with respect to them.

    Returns: forward(x, *constants).
    Cost: one forward or transpose for each evaluation; nothing but the constants is saved for backward.

    >>> linear(torch.ones(2), lambda x: 3 * x, lambda c: 3 * c)
    tensor([3., 3.])
    """
    return Linear.apply(x, forward, transpose, *constants)


class Linear(torch.autograd.Function):
    """Backward and jvp are again this function, so every order of derivative follows."""

    @staticmethod
    def forward(x: Tensor, forward: Callable, transpose: Callable, *constants: Tensor) -> Tensor:
        return forward(x, *constants)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.linear, ctx.transpose, *constants = inputs
        ctx.save_for_backward(*constants)
        ctx.save_for_forward(*constants)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:
        constants = ctx.saved_tensors
        return Linear.apply(cotangent, ctx.transpose, ctx.linear, *constants), None, None, *(None for _ in constants)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return Linear.apply(tangent, ctx.linear, ctx.transpose, *ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, forward: Callable, transpose: Callable, *constants: Tensor
    ) -> tuple[Tensor, int]:
        in_dims = (in_dims[0], *in_dims[3:])
        moved = [t.unsqueeze(-1) if dim is None else t.movedim(dim, -1) for t, dim in zip((x, *constants), in_dims, strict=True)]
        return Linear.apply(moved[0], forward, transpose, *moved[1:]), -1
