"""Gradients summed over a mesh axis."""
from functools import partial
from typing import Any

import torch

from fspeed.grad import in_trace, watched
from fspeed.opened import Later, in_turn
from fspeed.shard.collectives import psum
from fspeed.shard.mesh import Axis
from fspeed.shard.piece import at_least_float32
from fspeed.shard.pytree import tree_flatten, tree_unflatten
from fspeed.shard.wire import start_psum_
from fspeed.step import Batch, Grads, State


def sums(ax: Axis) -> Any:
    """A wrapper: stored gradients are summed over an axis, once a step."""
    def wrap(inner: Grads) -> Grads:
        def run(loss, state: State, batch: Batch):
            metrics, grads = inner(loss, state, batch)
            return metrics, None if grads is None else in_turn(lambda name, g: summed(g, ax, loss.reduce), grads)

        return run

    return wrap


def summed(group: Any, axis: Axis, dtype: torch.dtype | None) -> Any:
    """A group's gradients summed over an axis, later, in one message a dtype."""
    leaves, spec = tree_flatten(group)
    if axis.size == 1:
        return group
    wire = [x.to(dtype or at_least_float32(x.dtype)) for x in leaves]
    kinds = [[i for i, x in enumerate(wire) if x.dtype == kind] for kind in dict.fromkeys(x.dtype for x in wire)]
    plain = watched(group) or in_trace()
    start = (lambda x: partial(psum, x, axis)) if plain else (lambda x: start_psum_(x, axis).wait)
    waits = [start(torch.cat([wire[i].reshape(-1) for i in at])) for at in kinds]

    def finish() -> Any:
        out = list(leaves)
        for at, wait in zip(kinds, waits, strict=True):
            for i, part in zip(at, wait().split([wire[i].numel() for i in at]), strict=True):
                out[i] = part.view(leaves[i].shape)
        return tree_unflatten(spec, out)

    return Later(finish)
