"""The optimizer, run only where all gradients are finite."""
import functools
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace
from fspeed.shard.collectives import psum
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.step import State, Update


def guarded(apply: Update) -> Update:
    """The innermost update, done only where all gradients are finite."""
    def run(grads: Any, state: State):
        ok = finite(grads)
        if in_torch_func() or in_trace():
            new, metrics = apply(grads, state)
            new = tree_map(lambda a, b: torch.where(ok, a, b), new, state)
        else:
            new, metrics = apply(grads, state) if bool(ok) else (state, {})
        return new, {**metrics, "skipped": (~ok).to(torch.float32)}

    return run


def finite(grads: Any) -> Tensor:
    """Whether all gradients on all ranks are finite: bool, the same on every rank."""
    bad = sum(((~ends(g).isfinite()).any().to(torch.float32) for g in tree_leaves(grads) if g.numel()), torch.zeros(()))
    return functools.reduce(psum, grads.axes, bad) == 0


def ends(g: Tensor) -> Tensor:
    """The least and the greatest element, NaN if any is: one read, no copy."""
    return torch.stack(torch.aminmax(torch.view_as_real(g) if g.is_complex() else g))
