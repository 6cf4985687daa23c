"""Steps in one pass: torch's fused kernels on the leaves of a tree, or on the stretches of flat buffers that are treated alike."""
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace, requires_grad
from fspeed.optim.base import GradientTransformation
from fspeed.optim.leaves import ByNumber, Leaf, every, pieces, spread
from fspeed.optim.updates import apply_updates

DTYPE, DEVICE, WATCHED = attrgetter("dtype"), attrgetter("device"), attrgetter("requires_grad")
Row = tuple[Tensor, ...]        # elements that lie alike in memory: of parameters, gradients and moments


def in_one_pass(plain: GradientTransformation, fused: Callable[[Any, Any, Any], tuple[Any, Any] | None]) -> GradientTransformation:
    """A transformation that has `apply`: fused(grads, state, params), or the plain way where that does nothing and returns None."""
    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        done = None if in_trace() else fused(grads, state, params)      # a compiler fuses the plain way better
        if done is not None:
            return done
        updates, state = plain.update(grads, state, params)
        return apply_updates(params, updates), state

    return plain._replace(apply=apply)


def fixed(*hypers: Any) -> bool:
    """Whether all hyperparameters are python's numbers: known without asking a device."""
    return all(isinstance(h, (int, float)) for h in hypers)


def rows(mask: Callable[[Any], Any] | None, params: Any, grads: Any, *moments: Any) -> list[tuple[bool, Row]] | None:
    """(masked, row) for all stretches of elements that are treated alike; None if a kernel cannot take one of them.

    Args:
        mask: from the parameters to a tree of bools; None is True for all.
        params, grads, moments: trees that are stored alike.
    """
    flags: Any = ByNumber(tuple(every(params, True)) if mask is None else spread(mask, params))
    return rows_by(flags, params, grads, *moments)


def rows_by(value: Callable[[Leaf], Any], params: Any, grads: Any, *moments: Any) -> list[tuple[Any, Row]] | None:
    """`rows` with a value of the leaf in place of its mask."""
    try:
        found = list(pieces(value, params, grads, *moments))
    except ValueError:          # trees that are not alike, as in another optimizer's state: the plain way says what is wrong
        return None
    if not alike([x for _, row in found for x in row]):
        if not all([takes(*row) for _, row in found]):
            return None
        found = [(v, (p, laid_like(g, p), *rest)) for v, (p, g, *rest) in found]
    return [(v, row) for v, row in found if row[0].numel()]


def alike(xs: list[Tensor]) -> bool:
    """Whether tensors are contiguous, of one floating dtype and on one device, and nobody watches: as in most trees, soon seen."""
    one = len(set(map(DTYPE, xs))) == len(set(map(DEVICE, xs))) == 1 and xs[0].is_floating_point()
    return one and all(map(torch.Tensor.is_contiguous, xs)) and not (torch.is_grad_enabled() and any(map(WATCHED, xs)))


def takes(p: Tensor, g: Tensor, *moments: Tensor) -> bool:
    """Whether a parameter and its moments are of one floating dtype and lie in memory alike, without gaps; and nobody watches."""
    dtype, strides = p.dtype, p.stride()
    if any([m.dtype != dtype or m.stride() != strides or m.device != p.device for m in moments]):
        return False
    if torch.is_grad_enabled() and any([x.requires_grad for x in (p, g, *moments)]):
        return False
    dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == strides
    return dense and p.is_floating_point() and (g.dtype == dtype or torch.promote_types(dtype, g.dtype) == dtype)


def laid_like(g: Tensor, p: Tensor) -> Tensor:
    """A gradient in its parameter's dtype and strides: itself, or a copy."""
    return g if g.dtype == p.dtype and g.stride() == p.stride() else torch.empty_like(p).copy_(g)


def lists(found: list[tuple[Any, Row]]) -> Iterator[tuple[Any, list[list[Tensor]]]]:
    """The rows as lists, for each value, dtype and device: what one call of a kernel takes."""
    kinds: dict[Any, list[Row]] = {}
    for v, row in found:
        kinds.setdefault((v, row[0].dtype, row[0].device), []).append(row)
    for (v, *_), same in kinds.items():
        yield v, [list(column) for column in zip(*same, strict=True)]


def number(hyper: Any) -> Any:
    """A hyperparameter as python's number, where that neither waits for a device nor loses a gradient or a place in a graph."""
    on_host = isinstance(hyper, Tensor) and hyper.device.type == "cpu"
    return hyper.item() if on_host and not (requires_grad(hyper) or in_torch_func() or in_trace()) else hyper


def rate_for(learning_rate: Any, device: torch.device) -> Any:
    """A learning rate as a kernel takes it, without waiting for a device; None if it is differentiated."""
    rate = number(learning_rate)
    if not isinstance(rate, Tensor):
        return float(rate)
    return None if requires_grad(rate) else rate.to(device, torch.float32)
