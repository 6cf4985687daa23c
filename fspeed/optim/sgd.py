"""Gradient descent, and momentum."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, identity
from fspeed.optim.combine import chain
from fspeed.optim.fused import fixed, in_one_pass, lists, rate_for, rows
from fspeed.optim.moments import cast_like, wide, zeros
from fspeed.optim.scale import rate_now, scale_by_learning_rate
from fspeed.shard.pytree import tree_map


class TraceState(NamedTuple):
    """The decaying sum of updates."""
    trace: Any


def trace(decay: Number, nesterov: bool = False, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Momentum: the decaying sum of updates.

        t = u + decay t;    nesterov: u + decay t in place of t

    Args:
        decay: how much of the sum stays.
        nesterov: look one step ahead.
        accumulator_dtype: what the sum is kept in; by default as the parameters.

    Cost: one number kept for each parameter.

    Source: Sutskever et al., proceedings.mlr.press/v28/sutskever13.

    >>> opt = trace(.5)
    >>> updates, state = opt.update(torch.tensor(1.), opt.init(torch.tensor(0.)))
    >>> opt.update(torch.tensor(1.), state)
    (tensor(1.5000), TraceState(trace=tensor(1.5000)))
    """
    def update(updates: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        more = lambda u, t: wide(u) + decay * wide(t)
        new = tree_map(more, updates, state.trace)
        out = tree_map(more, updates, new) if nesterov else new
        return cast_like(out, updates), TraceState(cast_like(new, state.trace))

    return GradientTransformation(lambda params: TraceState(zeros(params, accumulator_dtype)), update)


def sgd(
    learning_rate: NumberOrSchedule, momentum: Number | None = None, nesterov: bool = False,
    accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Gradient descent, with momentum or without.

        p - learning_rate g;    with momentum p - learning_rate t, t as in `trace`

    Args:
        learning_rate: a number or a schedule.
        momentum: the decay of `trace`; None is no momentum, and nothing is kept.
        nesterov, accumulator_dtype: as for `trace`.

    Returns:
        A transformation that steps in one pass, unless `accumulator_dtype` is given.

    Cost: nothing kept, with momentum one number for each parameter.

    >>> opt = sgd(.1)
    >>> params = torch.tensor([1., 1.])
    >>> opt.apply(torch.tensor([2., -.1]), opt.init(params), params)[0]
    tensor([0.8000, 1.0100])
    """
    first = identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype)
    plain = chain(first, scale_by_learning_rate(learning_rate))
    decay: Any = 0.0 if momentum is None else momentum

    def fused(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple] | None:
        lr, next_rate = rate_now(learning_rate, state[1])
        found = rows(None, params, grads, *state[0])
        done = found is not None and all(_descended(columns, lr, decay, nesterov) for _, columns in lists(found))
        return (params, (state[0], next_rate)) if done else None

    return in_one_pass(plain, fused) if accumulator_dtype is None and fixed(decay) and momentum != 0 else plain


@torch.no_grad()
def _descended(columns: list[list[Tensor]], lr: Any, decay: float, nesterov: bool) -> bool:
    """Write over parameters and traces; False, and nothing is written, if the rate is differentiated."""
    ps, gs, *traces = columns
    rate = rate_for(lr, ps[0].device)
    if rate is None:
        return False
    us: Any = gs
    if traces and ps[0].is_cpu and ps[0].dtype.itemsize >= 4:       # torch 2.13's kernel is wrong for shorter floats
        torch._fused_sgd_(
            ps, gs, *traces, lr=rate, momentum=decay, dampening=0.0, weight_decay=0.0, nesterov=nesterov, maximize=False,
            is_first_step=False,
        )
        return True
    if traces:
        us, = traces
        torch._foreach_mul_(us, decay)
        torch._foreach_add_(us, gs)
        us = torch._foreach_add(gs, us, alpha=decay) if nesterov else us
    if isinstance(rate, Tensor):
        torch._foreach_sub_(ps, torch._foreach_mul(us, rate))
    else:
        torch._foreach_add_(ps, us, alpha=-rate)
    return True
