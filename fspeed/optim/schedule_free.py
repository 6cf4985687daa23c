"""Schedule-free optimizers: averages of iterates in place of a decaying learning rate."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count, require_params, value_at
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.moments import cast_like, wide
from fspeed.optim.rms import scale_by_rms
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.optim.schedules import warmup_constant_schedule
from fspeed.optim.sgd import sgd
from fspeed.shard.pytree import tree_leaves, tree_map


class ScheduleFreeState(NamedTuple):
    """b1, the sum of weights, the count from 1 (int32), the greatest rate so far, the base optimizer's state, and its iterate z."""
    b1: Tensor
    weight_sum: Tensor
    step_count: Tensor
    max_lr: Tensor
    base_optimizer_state: Any
    z: Any


def schedule_free_eval_params(state: ScheduleFreeState, params: Any) -> Any:
    """The averaged iterate x, which is to be evaluated, from the parameters y that are trained.

        x = (y - (1 - b1) z) / b1

    >>> opt = schedule_free_sgd(1.)
    >>> schedule_free_eval_params(opt.init(torch.tensor(2.)), torch.tensor(2.))
    tensor(2.)
    """
    return tree_map(lambda y, z: ((wide(y) - (1 - state.b1) * wide(z)) / state.b1).to(y.dtype), params, state.z)


def schedule_free(
    base_optimizer: GradientTransformation, learning_rate: NumberOrSchedule, b1: Number = 0.9, weight_lr_power: Number = 2.0,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Train at a point between an optimizer's iterate and the average of its iterates.

        z = z + u;    x = (1 - c) x + c z,    c = w / sum of w,    w = max(learning_rate so far)^weight_lr_power
        y = b1 x + (1 - b1) z

    The parameters are y; evaluate x, `schedule_free_eval_params(state, params)`.

    Args:
        base_optimizer: what gives u; without momentum of its own.
        learning_rate: its learning rate, for the weights.
        b1: how much of the average is in y.
        weight_lr_power: of the weights.
        state_dtype: what z is kept in; by default as the parameters.

    Cost: one number kept for each parameter beside the base optimizer's.

    Source: Defazio et al., arXiv 2405.15682.

    >>> opt = schedule_free(sgd(.5), .5)
    >>> opt.update(torch.tensor(1.), opt.init(torch.tensor(0.)), torch.tensor(0.))[0]
    tensor(-0.5000)
    """
    def init(params: Any) -> ScheduleFreeState:
        count = new_count(params)
        dtype = min((x.dtype for x in tree_leaves(params)), key=lambda d: d.itemsize, default=torch.float32)
        number = lambda value: torch.full((), float(value), dtype=dtype, device=count.device)
        z = tree_map(lambda p: p.to(state_dtype or p.dtype, copy=True), params)
        return ScheduleFreeState(number(b1), number(0), count + 1, number(0), base_optimizer.init(params), z)

    def update(updates: Any, state: ScheduleFreeState, params: Any = None) -> tuple[Any, ScheduleFreeState]:
        require_params(params, "schedule_free")
        updates, base_state = base_optimizer.update(updates, state.base_optimizer_state, params)
        rate = torch.as_tensor(value_at(learning_rate, state.step_count), dtype=state.max_lr.dtype, device=state.max_lr.device)
        max_lr = torch.maximum(state.max_lr, rate)
        weight = max_lr**weight_lr_power
        total = state.weight_sum + weight
        c = torch.where(total == 0, 0, weight / torch.where(total == 0, 1, total))
        z = tree_map(lambda z, u: wide(z) + wide(u), state.z, updates)

        def moved(p: Tensor, u: Tensor, old: Tensor, new: Tensor) -> Tensor:
            y = wide(p)
            x = (1 - c) * (y - (1 - b1) * wide(old)) / b1 + c * new
            return (b1 * x + (1 - b1) * new - y).to(u.dtype)

        out = tree_map(moved, params, updates, state.z, z)
        return out, ScheduleFreeState(state.b1, total, increment(state.step_count), max_lr, base_state, cast_like(z, state.z))

    return GradientTransformation(init, update)


def schedule_free_sgd(
    learning_rate: Number = 1.0, warmup_steps: int | None = None, b1: Number = 0.9, weight_decay: Number | None = None,
    weight_lr_power: Number = 2.0, state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Schedule-free gradient descent.

    Args:
        learning_rate: a number.
        warmup_steps: over how many updates the rate rises to it.
        weight_decay: as for `add_decayed_weights`.
        b1, weight_lr_power, state_dtype: as for `schedule_free`.

    Cost: one number kept for each parameter.

    Source: Defazio et al., arXiv 2405.15682.

    >>> opt = schedule_free_sgd(.5)
    >>> opt.update(torch.tensor(1.), opt.init(torch.tensor(0.)), torch.tensor(0.))[0]
    tensor(-0.5000)
    """
    rate = _risen(learning_rate, warmup_steps)
    base = sgd(rate) if weight_decay is None else chain(add_decayed_weights(weight_decay), sgd(rate))
    return schedule_free(base, rate, b1, weight_lr_power, state_dtype)


def schedule_free_adamw(
    learning_rate: Number = 0.0025, warmup_steps: int | None = None, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8,
    weight_decay: Number = 0.0, weight_lr_power: Number = 2.0, state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Schedule-free AdamW.

    Args:
        learning_rate: a number.
        warmup_steps: over how many updates the rate rises to it.
        b2, eps: as for `adamw`.
        weight_decay: as for `add_decayed_weights`.
        b1, weight_lr_power, state_dtype: as for `schedule_free`.

    Cost: two numbers kept for each parameter.

    Source: Defazio et al., arXiv 2405.15682.

    >>> opt = schedule_free_adamw(.5)
    >>> opt.update(torch.tensor(2.), opt.init(torch.tensor(0.)), torch.tensor(0.))[0]
    tensor(-0.5000)
    """
    rate = _risen(learning_rate, warmup_steps)
    base = chain(
        scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True), add_decayed_weights(weight_decay),
        scale_by_learning_rate(rate),
    )
    return schedule_free(base, rate, b1, weight_lr_power, state_dtype)


def _risen(learning_rate: Number, warmup_steps: int | None) -> NumberOrSchedule:
    return learning_rate if warmup_steps is None else warmup_constant_schedule(0, learning_rate, warmup_steps)
