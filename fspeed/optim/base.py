"""The protocol: a pair of pure functions, init and update, and for some optimizers a third that does a step in one pass."""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.shard.pytree import tree_leaves, tree_map

Number = float | Tensor
Schedule = Callable[[Any], Any]
NumberOrSchedule = Number | Schedule


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: what maps gradients to updates.

        state = init(params);    updates, state = update(grads, state, params);    params = params + updates

    Args:
        init: params -> state.
        update: (updates, state, params=None) -> (updates, state): pure, and differentiable by torch.func.
        apply: (grads, state, params) -> (params, state), the same as `update` and adding, within rounding, in one pass. It
            writes over the state and params that it is given, and only reads grads; what autograd watches it leaves to `update`.
            None where there is no such pass.

    >>> import torch
    >>> halve = GradientTransformation(lambda params: EmptyState(), lambda u, state, params=None: (u / 2, state))
    >>> halve.update(torch.tensor(3.), halve.init(torch.tensor(0.)))
    (tensor(1.5000), EmptyState())
    """
    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    apply: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None


class EmptyState(NamedTuple):
    """The state of what remembers nothing."""


def stateless(f: Callable[[Any, Any], Any]) -> GradientTransformation:
    """What maps (updates, params) to updates and remembers nothing.

    >>> import torch
    >>> stateless(lambda updates, params: updates + params).update(torch.tensor(1.), EmptyState(), torch.tensor(2.))
    (tensor(3.), EmptyState())
    """
    return GradientTransformation(lambda params: EmptyState(), lambda updates, state, params=None: (f(updates, params), state))


def stateless_with_tree_map(f: Callable[[Tensor, Tensor | None], Tensor]) -> GradientTransformation:
    """What maps each update (and its parameter, or None) to an update and remembers nothing.

    >>> import torch
    >>> stateless_with_tree_map(lambda u, p: u + 1).update({"w": torch.tensor(1.)}, EmptyState())[0]
    {'w': tensor(2.)}
    """
    def run(updates: Any, params: Any) -> Any:
        return tree_map(lambda u: f(u, None), updates) if params is None else tree_map(f, updates, params)

    return stateless(run)


def identity() -> GradientTransformation:
    """What leaves updates as they are.

    >>> identity().update(1., EmptyState())
    (1.0, EmptyState())
    """
    return stateless(lambda updates, params: updates)


def set_to_zero() -> GradientTransformation:
    """What makes all updates zero.

    >>> import torch
    >>> set_to_zero().update(torch.tensor(3.), EmptyState())
    (tensor(0.), EmptyState())
    """
    return stateless_with_tree_map(lambda u, p: torch.zeros_like(u))


def require_params(params: Any, who: str) -> None:
    if params is None:
        raise ValueError(f"{who}: update needs params, its third argument, and got none")


# ---------------------------------------------------------------- counts
def new_count(params: Any) -> Tensor:
    """An update count of zero, where the parameters are: int32, 0-d."""
    leaves = tree_leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def increment(count: Tensor) -> Tensor:
    """The count plus one; the greatest int32 stays."""
    return count + (count < 2**31 - 1)


def value_at(hyper: NumberOrSchedule, count: Any) -> Any:
    """A hyperparameter's value: a number as it is, or what a schedule gives for a count."""
    return hyper(count) if callable(hyper) else hyper
