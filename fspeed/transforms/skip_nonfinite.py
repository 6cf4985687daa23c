"""Steps whose gradients overflow are skipped, on every rank."""
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace
from fspeed.shard.collectives import psum
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.step import State, Step, Update


def skip_nonfinite(step: Step) -> Step:
    """Same in and out as the step; where a gradient on any rank is inf or NaN, params and opt_state stay as they were.

    `state.step` counts the call; what counts updates (moments, schedules) does not. The metrics say `skipped`: 0 or 1.

    Args:
        step: a step.

    Returns:
        A step whose metrics have `skipped`.

    Cost: one read of the gradients and one number summed over every mesh axis.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = skip_nonfinite(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)))
    >>> state, metrics = s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., float("inf")]))
    >>> s.params(state), metrics["skipped"]
    ({'w': tensor(0.)}, tensor(1.))
    """
    return replace(step, update=lambda apply: step.update(guarded(apply)))


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
