"""Collectives as functions: JAX's names and meanings, over one axis of a mesh, each with its true transpose.

psum's transpose is psum, all_gather's reduce_scatter, and the inverse exchange that of ppermute and all_to_all. So a gradient
taken on every rank is the gradient of the sum of all ranks' losses. All ranks of the axis make the same calls in the same order,
with equal shapes and dtypes. Over an axis of size 1 each is the identity.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .linear import linear
from .mesh import Axis
from .wire import agree, start_all_gather, start_all_to_all, start_exchange, start_pmax, start_psum, start_reduce_scatter


def psum(x: Tensor, axis: Axis) -> Tensor:
    """The sum over an axis: y = sum over ranks r of x_r, on every rank.

    Args:
        x: any shape; a dtype with addition. Booleans are counted, in int64.
        axis: the ranks to sum over.

    Returns: x's shape and dtype, the same bits on all ranks.
    Raises: CollectiveError if a rank fails, comes too late, or calls something else.
    Cost: 2 (size - 1) / size * x bytes sent; the same for its transpose, psum.

    >>> psum(torch.ones(3), Axis("data", 0, 0, 1, None))
    tensor([1., 1., 1.])

    Source: `jax.lax.psum`.
    """
    x = x.long() if x.dtype == torch.bool else x
    if axis.size == 1:
        return x
    total = lambda x: start_psum(x, axis).wait()
    return linear(x, total, total)


def pmean(x: Tensor, axis: Axis) -> Tensor:
    """The mean over an axis: y = psum(x) / size.

    Args:
        x: any shape; integers give floats, as division does.
        axis: the ranks to average over.

    Returns: x's shape, the same bits on all ranks.
    Raises: as `psum`.
    Cost: as `psum`; its transpose is pmean.

    >>> pmean(torch.ones(3), Axis("data", 0, 0, 1, None))
    tensor([1., 1., 1.])

    Source: `jax.lax.pmean`.
    """
    return psum(x, axis) / axis.size


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """The largest over an axis: y = max over ranks r of x_r, elementwise.

    The derivative is the mean over the ranks that hold the largest: dy = psum(w dx), w = (x == y) / psum(x == y).

    Args:
        x: any shape; a real dtype. A NaN on any rank gives NaN.
        axis: the ranks to look at.

    Returns: x's shape and dtype, the same bits on all ranks.
    Raises: as `psum`.
    Cost: as `psum`; two psums for a derivative.

    >>> pmax(torch.arange(3), Axis("data", 0, 0, 1, None))
    tensor([0, 1, 2])

    Source: `jax.lax.pmax`, which has no derivative; ties share it as in `jax.numpy.max`.
    """
    return x if axis.size == 1 else Largest.apply(x, axis)


def all_gather(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Everyone's values: y = concat over ranks r of x_r along dim.

    Args:
        x: at least one dim, any dtype.
        axis: the ranks to gather from.
        dim: the dim that grows.

    Returns: x's shape with dim times size.
    Raises: as `psum`.
    Cost: (size - 1) * x bytes received; its transpose is reduce_scatter, of as many.

    >>> all_gather(torch.arange(3), Axis("data", 0, 0, 1, None))
    tensor([0, 1, 2])

    Source: `jax.lax.all_gather(tiled=True)`.
    """
    dim = from_front(x, dim)
    if axis.size == 1:
        return x
    return linear(x, lambda x: gather_dim(x, axis, dim), lambda c: scatter_dim(c, axis, dim))


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Each rank's share of the sum: y on rank r = part r, of size equal parts along dim, of psum(x).

    Args:
        x: at least one dim; a dtype with addition.
        axis: the ranks to sum over.
        dim: the dim that is shared out.

    Returns: x's shape with dim divided by size.
    Raises: ValueError if size does not divide dim; else as `psum`.
    Cost: (size - 1) / size * x bytes sent; its transpose is all_gather, of as many.

    >>> reduce_scatter(torch.arange(3), Axis("data", 0, 0, 1, None))
    tensor([0, 1, 2])

    Source: `jax.lax.psum_scatter(tiled=True)`.
    """
    dim = from_front(x, dim)
    check_divides("reduce_scatter", x, axis, dim)
    if axis.size == 1:
        return x
    return linear(x, lambda x: scatter_dim(x, axis, dim), lambda c: gather_dim(c, axis, dim))


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Values sent on: y on rank d = x of rank s for each (s, d) in perm, and zeros on a rank that is no destination.

    Args:
        x: any shape and dtype.
        axis: the ranks to send among.
        perm: (source, destination) pairs; no source and no destination twice.

    Returns: x's shape and dtype.
    Raises: ValueError if perm is not of that form; else as `psum`.
    Cost: x bytes sent by each source; its transpose is the inverse permutation.

    >>> ppermute(torch.arange(3), Axis("data", 0, 0, 1, None), [(0, 0)])
    tensor([0, 1, 2])

    Source: `jax.lax.ppermute`.
    """
    for end in zip(*perm, strict=True):
        if len(set(end)) < len(perm) or not set(end) <= set(range(axis.size)):
            raise ValueError(f"perm {list(perm)} is not pairs of ranks under {axis.size}, each at most once on each side")
    back = [(destination, source) for source, destination in perm]
    return linear(x, lambda x: permuted(x, axis, perm), lambda c: permuted(c, axis, back))


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Parts exchanged: y on rank r = concat over ranks q, along concat_dim, of part r, of size equal parts along split_dim, of x_q.

    Args:
        x: at least one dim, any dtype.
        axis: the ranks to exchange with.
        split_dim: the dim that is shared out.
        concat_dim: the dim that grows.

    Returns: x's shape with split_dim divided by, and concat_dim times, size.
    Raises: ValueError if size does not divide split_dim; else as `psum`.
    Cost: (size - 1) / size * x bytes sent; its transpose is its inverse, all_to_all with the dims swapped.

    >>> all_to_all(torch.arange(3), Axis("data", 0, 0, 1, None))
    tensor([0, 1, 2])

    Source: `jax.lax.all_to_all(tiled=True)`.
    """
    split, concat = from_front(x, split_dim), from_front(x, concat_dim)
    check_divides("all_to_all", x, axis, split)
    if axis.size == 1:
        return x
    return linear(x, lambda x: exchange_dims(x, axis, split, concat), lambda c: exchange_dims(c, axis, concat, split))


def axis_index(axis: Axis) -> int:
    """This rank's place along an axis, 0 to size - 1.

    >>> axis_index(Axis("data", 0, 0, 1, None))
    0

    Source: `jax.lax.axis_index`.
    """
    return axis.rank


def axis_size(axis: Axis) -> int:
    """How many ranks lie along an axis.

    >>> axis_size(Axis("data", 0, 0, 1, None))
    1

    Source: `jax.lax.axis_size`.
    """
    return axis.size


# ---- the linear functions and their dims


def gather_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    parts = start_all_gather(x.unsqueeze(0), axis).wait()
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def scatter_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    parts = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0)
    return start_reduce_scatter(parts, axis).wait().squeeze(0)


def exchange_dims(x: Tensor, axis: Axis, split: int, concat: int) -> Tensor:
    parts = x.unflatten(split, (axis.size, x.shape[split] // axis.size)).movedim(split, 0)
    return start_all_to_all(parts, axis).wait().movedim(0, concat).flatten(concat, concat + 1)


def permuted(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Tensor:
    count = x.numel()
    send = [count * ((axis.rank, rank) in perm) for rank in range(axis.size)]
    receive = [count * ((rank, axis.rank) in perm) for rank in range(axis.size)]
    if axis.size == 1:
        return x.clone() if perm else torch.zeros_like(x)
    agree(f"ppermute {list(perm)}", x, axis)
    arrived = start_exchange("ppermute", x.reshape(-1)[: sum(send)], axis, send, receive).wait()
    return arrived.view(x.shape) if sum(receive) == count else torch.zeros_like(x)


class Largest(torch.autograd.Function):
    """pmax: its derivative is linear, with weights that are constant almost everywhere."""

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return start_pmax(x, axis).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.axis = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:
        axis = ctx.axis
        return linear(cotangent, partial(scaled_sum, axis), partial(sum_scaled, axis), weights(axis, *ctx.saved_tensors)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        axis = ctx.axis
        return linear(tangent, partial(sum_scaled, axis), partial(scaled_sum, axis), weights(axis, *ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, axis: Axis) -> tuple[Tensor, int]:
        return Largest.apply(x.movedim(in_dims[0], 0), axis), 0


def weights(axis: Axis, x: Tensor, largest: Tensor) -> Tensor:
    """(x == largest), shared evenly by the ranks where it holds."""
    here = (x == largest).to(x.dtype)
    return here / psum(here, axis)


def sum_scaled(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    return start_psum(w * x, axis).wait()


def scaled_sum(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    return w * start_psum(x, axis).wait()


def from_front(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x of shape {tuple(x.shape)} has no dim {dim}")
    return dim % x.ndim


def check_divides(operation: str, x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(f"{operation}: {axis.size} ranks of axis {axis.name!r} cannot share dim {dim} of {tuple(x.shape)} evenly")
