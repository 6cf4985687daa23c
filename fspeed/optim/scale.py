"""Updates times a step size, a number or a schedule."""
from typing import Any, NamedTuple

from torch import Tensor

from fspeed.optim.base import (
    GradientTransformation,
    Number,
    NumberOrSchedule,
    Schedule,
    identity,
    increment,
    new_count,
    stateless_with_tree_map,
)
from fspeed.optim.moments import near
from fspeed.shard.pytree import tree_map


class ScaleByScheduleState(NamedTuple):
    """How many updates a schedule has seen: int32."""
    count: Tensor       # type: ignore[assignment]


def scale(step_size: Number) -> GradientTransformation:
    """Multiply updates by a number.

        step_size u

    Args:
        step_size: a number, or a 0-d tensor, which may be differentiated.

    >>> import torch
    >>> scale(.5).update(torch.tensor(3.), ())[0]
    tensor(1.5000)
    """
    return stateless_with_tree_map(lambda u, p: times(step_size, u))


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply updates by what a schedule gives for the number of updates before this one.

        step_size_fn(count) u

    Args:
        step_size_fn: from a count, an int32 0-d tensor, to a number.

    >>> import torch
    >>> opt = scale_by_schedule(lambda count: 1 / (1 + count))
    >>> state = opt.update(torch.tensor(3.), opt.init(torch.tensor(0.)))[1]
    >>> opt.update(torch.tensor(3.), state)
    (tensor(1.5000), ScaleByScheduleState(count=tensor(2, dtype=torch.int32)))
    """
    def update(updates: Any, state: ScaleByScheduleState, params: Any = None) -> tuple[Any, ScaleByScheduleState]:
        step_size = step_size_fn(state.count)
        return tree_map(lambda u: times(step_size, u), updates), ScaleByScheduleState(increment(state.count))

    return GradientTransformation(lambda params: ScaleByScheduleState(new_count(params)), update)


def scale_by_learning_rate(learning_rate: NumberOrSchedule | None = None, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply updates by minus a learning rate: the last link of most optimizers.

        -learning_rate u

    Args:
        learning_rate: a number or a schedule; None leaves updates as they are.
        flip_sign: whether to go down the gradient; False leaves the minus out.

    >>> import torch
    >>> scale_by_learning_rate(.5).update(torch.tensor(3.), ())[0]
    tensor(-1.5000)
    """
    if learning_rate is None:
        return identity()
    if not (callable(learning_rate) or isinstance(learning_rate, (int, float, Tensor))):
        raise TypeError(f"learning_rate must be a number, a 0-d tensor or a schedule, got {learning_rate!r}")
    sign = -1 if flip_sign else 1
    return scale_by_schedule(lambda count: sign * learning_rate(count)) if callable(learning_rate) else scale(sign * learning_rate)


def times(number: Any, u: Tensor) -> Tensor:
    """A number times an update, in the update's dtype."""
    return (near(number, u) * u).to(u.dtype)


def rate_now(learning_rate: NumberOrSchedule, state: Any) -> tuple[Any, Any]:
    """The learning rate at a state of `scale_by_learning_rate`, and the next state."""
    if isinstance(state, ScaleByScheduleState):
        return learning_rate(state.count), ScaleByScheduleState(increment(state.count))     # type: ignore[operator]
    return learning_rate, state
