"""The moving average of updates."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, increment, new_count
from fspeed.optim.moments import bias_correction, cast_like, update_moment, zeros


class EmaState(NamedTuple):
    """The number of updates (int32), and their moving averages."""
    count: Tensor       # type: ignore[assignment]
    ema: Any


def ema(decay: Number, debias: bool = True, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """The moving average of updates in their place.

        m = decay m + (1 - decay) u;    m / (1 - decay^t)

    Args:
        decay: how slowly it forgets.
        debias: divide by 1 - decay^t.
        accumulator_dtype: what it is kept in; by default as the parameters.

    Cost: one number kept for each parameter.

    >>> opt = ema(.5)
    >>> opt.update(torch.tensor(1.), opt.init(torch.tensor(0.)))
    (tensor(1.), EmaState(count=tensor(1, dtype=torch.int32), ema=tensor(0.5000)))
    """
    def update(updates: Any, state: EmaState, params: Any = None) -> tuple[Any, EmaState]:
        new, count = update_moment(updates, state.ema, decay), increment(state.count)
        out = bias_correction(new, decay, count) if debias else new
        return cast_like(out, updates), EmaState(count, cast_like(new, state.ema))

    return GradientTransformation(lambda params: EmaState(new_count(params), zeros(params, accumulator_dtype)), update)
