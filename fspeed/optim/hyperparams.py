"""Hyperparameters that are part of the state: to be read, set and scheduled."""
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, increment, new_count
from fspeed.optim.fused import number
from fspeed.optim.updates import apply_updates
from fspeed.shard.pytree import tree_leaves


class InjectStatefulHyperparamsState(NamedTuple):
    """The number of updates (int32), the hyperparameters last used, their schedules' states, and the optimizer's."""
    count: Tensor       # type: ignore[assignment]
    hyperparams: Any
    hyperparams_states: Any
    inner_state: Any


class WrappedScheduleState(NamedTuple):
    """How many updates a hyperparameter's schedule has seen: int32."""
    count: Tensor       # type: ignore[assignment]


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = (),
    hyperparam_dtype: torch.dtype | None = None,
) -> Callable[..., GradientTransformation]:
    """An optimizer whose hyperparameters are in its state, `state.hyperparams[name]`.

    Numbers are kept and may be replaced there; schedules, whatever hyperparameter they are for, are called with the count.

    Args:
        inner_factory: makes the optimizer, such as `adamw`.
        static_args: names of arguments to leave out of the state.
        hyperparam_dtype: the dtype of floats; by default the widest of the parameters'.

    Returns:
        A function with `inner_factory`'s arguments.

    Raises:
        ValueError: `inner_factory` has no such argument.

    Cost: 0-d tensors. It steps in one pass where hyperparameters are on the CPU and `inner_factory`'s optimizer does.

    >>> from fspeed.optim.sgd import sgd
    >>> opt = inject_hyperparams(sgd)(learning_rate=.5)
    >>> state = opt.init(torch.tensor(0.))
    >>> state.hyperparams
    {'learning_rate': tensor(0.5000)}
    >>> state.hyperparams["learning_rate"] = torch.tensor(.25)
    >>> opt.update(torch.tensor(1.), state)[0]
    tensor(-0.2500)
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(inner_factory)
    if not static <= set(signature.parameters):
        raise ValueError(f"inject_hyperparams: static_args {sorted(static)} are not all among {list(signature.parameters)}")

    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        held = {k: v for k, v in given.items() if k not in static and not isinstance(v, bool)}
        schedules = {k: v for k, v in held.items() if callable(v)}
        fixed = {k: v for k, v in held.items() if isinstance(v, (int, float, Tensor))}
        rest = {k: v for k, v in given.items() if k not in schedules and k not in fixed}
        return _injected(lambda hypers: inner_factory(**rest, **hypers), fixed, schedules, hyperparam_dtype)

    return make


def _injected(make: Callable[[dict], GradientTransformation], fixed: dict, schedules: dict, dtype: torch.dtype | None) -> Any:
    def init(params: Any) -> InjectStatefulHyperparamsState:
        count = new_count(params)
        as_tensor = lambda v: _tensor(v, dtype or widest(params), count.device)
        hypers = {k: as_tensor(v) for k, v in fixed.items()} | {k: as_tensor(f(count)) for k, f in schedules.items()}
        states = {k: WrappedScheduleState(count.clone()) for k in schedules}
        return InjectStatefulHyperparamsState(count, hypers, states, make(hypers).init(params))

    def advanced(state: InjectStatefulHyperparamsState, like: Any) -> InjectStatefulHyperparamsState:
        """The next state, but for the optimizer's."""
        as_tensor = lambda v: _tensor(v, dtype or widest(like), state.count.device)
        now = {k: as_tensor(f(state.hyperparams_states[k].count)) for k, f in schedules.items()}
        states = {k: WrappedScheduleState(increment(s.count)) for k, s in state.hyperparams_states.items()}
        return state._replace(count=increment(state.count), hyperparams={**state.hyperparams, **now}, hyperparams_states=states)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = advanced(state, updates if params is None else params)
        updates, inner_state = make(new.hyperparams).update(updates, state.inner_state, params)
        return updates, new._replace(inner_state=inner_state)

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        new = advanced(state, params)
        inner = make({k: number(v) for k, v in new.hyperparams.items()})
        if inner.apply is not None:
            params, inner_state = inner.apply(grads, state.inner_state, params)
        else:
            updates, inner_state = inner.update(grads, state.inner_state, params)
            params = apply_updates(params, updates)
        return params, new._replace(inner_state=inner_state)

    return GradientTransformation(init, update, apply)


def _tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A hyperparameter as a 0-d tensor of its own: what is no integer in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
    return torch.full((), value, dtype=dtype if isinstance(value, float) else torch.int32, device=device)


def widest(tree: Any) -> torch.dtype:
    """The dtype that all leaves' dtypes promote to."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tree_leaves(tree)), torch.float32)
