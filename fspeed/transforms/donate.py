"""Donation: the memory of the state that goes in becomes that of the state that comes out."""
from typing import Any

import torch

from fspeed.grad import watched
from fspeed.opened import Opened
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.step import Batch, Grads, State, Step, Update, outside

MARK = "_fspeed_donated"


def donate(step: Step) -> Step:
    """Same in and out as the step, but the state that is passed in is used up: parameters and moments are updated in place.

    Args:
        step: a step.

    Returns:
        A step that holds one copy of parameters and moments at any time, if its optimizer updates in one pass.

    Raises:
        RuntimeError: when called with a state that was donated before.

    Cost: no copy of parameters and moments.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = donate(step(lambda p, batch, key: mean(p["w"] * batch), optim.adamw(1.)))
    >>> old = s.init({"w": torch.tensor(0.)})
    >>> new, _ = s(old, torch.tensor([1., 3.]))
    >>> s(old, torch.tensor([1., 3.]))
    Traceback (most recent call last):
      ...
    RuntimeError: this state was donated to a step, which wrote over it; use the state that the step returned
    """
    def update(apply: Update) -> Update:
        inner = step.update(apply)

        def run(grads: Any, state: State):
            new, metrics = inner(grads, state)
            if watched(grads, state):
                return new, metrics         # nothing was written over
            fresh = new._replace(params=renamed(new.params), opt_state=renamed(new.opt_state))
            for x in tree_leaves((state.params, state.opt_state)):
                setattr(x, MARK, True)
            return fresh, metrics

        return run

    return outside(step, unused, update=update, own=lambda tree: tree)


def unused(inner: Grads) -> Grads:
    """A wrapper that refuses a state that was donated before."""
    def run(loss: Opened, state: State, batch: Batch):
        if any(hasattr(x, MARK) for x in tree_leaves((state.params, state.opt_state))):
            raise RuntimeError("this state was donated to a step, which wrote over it; use the state that the step returned")
        return inner(loss, state, batch)

    return run


def renamed(tree: Any) -> Any:
    """The same memory under new tensor objects."""
    return tree_map(torch.Tensor.detach, tree)
