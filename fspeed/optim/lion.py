"""Lion: updates by the sign of a moving average."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.grad import requires_grad
from fspeed.ops.optimizers import lion_
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights, decay_now
from fspeed.optim.fused import fixed, in_one_pass, rate_for, rows
from fspeed.optim.kernels import flat, ready, triton
from fspeed.optim.leaves import as_function
from fspeed.optim.masking import Mask
from fspeed.optim.moments import cast_like, near, update_moment, wide, zeros
from fspeed.optim.scale import rate_now, scale_by_learning_rate
from fspeed.shard.pytree import tree_map


class ScaleByLionState(NamedTuple):
    """The number of updates (int32), and the moving averages of gradients."""
    count: Tensor       # type: ignore[assignment]
    mu: Any


def scale_by_lion(
    b1: Number = 0.9, b2: Number = 0.99, mu_dtype: torch.dtype | None = None, *, mode: str = "hard", smooth_beta: float = 1.0,
) -> GradientTransformation:
    """The sign of a moving average.

        u = sign(b1 mu + (1 - b1) g);    mu = b2 mu + (1 - b2) g

    Args:
        b1: how much of mu is in the update.
        b2: how slowly mu forgets.
        mu_dtype: what mu is kept in; by default as the parameters.
        mode: "hard" for the sign, "smooth" for tanh(smooth_beta x), "refined" for x within [-1, 1] and the sign outside.
        smooth_beta: of "smooth".

    Raises:
        ValueError: no such mode.

    Cost: one number kept for each parameter.

    Source: Chen et al., arXiv 2302.06675.

    >>> opt = scale_by_lion()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """
    modes = {
        "hard": torch.sgn,
        "smooth": lambda x: torch.tanh(smooth_beta * x),
        "refined": lambda x: torch.where(x.abs() < 1, x, x.sgn()),
    }
    if mode not in modes:
        raise ValueError(f"scale_by_lion: mode must be one of {list(modes)}, got {mode!r}")

    def update(updates: Any, state: ScaleByLionState, params: Any = None) -> tuple[Any, ScaleByLionState]:
        out = tree_map(lambda g, m: modes[mode]((1 - b1) * wide(g) + b1 * wide(m)).to(g.dtype), updates, state.mu)
        mu = cast_like(update_moment(updates, state.mu, b2), state.mu)
        return out, ScaleByLionState(increment(state.count), mu)

    return GradientTransformation(lambda params: ScaleByLionState(new_count(params), zeros(params, mu_dtype)), update)


def lion(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.99, mu_dtype: torch.dtype | None = None,
    weight_decay: NumberOrSchedule = 1e-3, mask: Mask | None = None,
) -> GradientTransformation:
    """Lion.

        p - learning_rate (sign(b1 mu + (1 - b1) g) + weight_decay p)

    Args:
        learning_rate: a number or a schedule.
        b1, b2, mu_dtype: as for `scale_by_lion`.
        weight_decay, mask: as for `add_decayed_weights`.

    Returns:
        A transformation; with `mu_dtype=None` it steps in one pass.

    Cost: one number kept for each parameter; in one pass it reads three and writes two.

    Source: Chen et al., arXiv 2302.06675.

    >>> opt = lion(.1, weight_decay=.5)
    >>> params = torch.tensor([1., 1.])
    >>> opt.apply(torch.tensor([2., -.1]), opt.init(params), params)[0]
    tensor([0.8500, 1.0500])
    """
    plain = chain(
        scale_by_lion(b1, b2, mu_dtype), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )

    decays = None if mask is None else as_function(mask)

    def fused(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple] | None:
        lr, next_rate = rate_now(learning_rate, state[2])
        wd, next_decay = decay_now(weight_decay, state[1])
        found = rows(decays, params, grads, state[0].mu)
        if found is None or rate_for(lr, state[0].count.device) is None or (isinstance(wd, Tensor) and requires_grad(wd)):
            return None
        on_gpu = triton([row for _, row in found]) and not isinstance(wd, Tensor)
        run = ready(_descend, [row for _, row in found])
        for decayed, row in found:
            rate = rate_for(lr, row[0].device)
            if on_gpu:
                lion_(*flat(row), rate=rate, b1=b1, b2=b2, weight_decay=wd if decayed else 0.0)
                continue
            run(row, rate, 1 - rate * near(wd, row[0]) if decayed else 1.0, b1, 1 - b1, b2, 1 - b2)
        return params, (ScaleByLionState(increment(state[0].count), state[0].mu), next_decay, next_rate)

    return in_one_pass(plain, fused) if mu_dtype is None and fixed(b1, b2) else plain


def _descend(p: Tensor, g: Tensor, mu: Tensor, numbers: tuple) -> None:
    rate, shrink, b1, a1, b2, a2 = numbers
    g, m = wide(g), wide(mu)
    torch.sub(shrink * wide(p), rate * torch.sgn(a1 * g + b1 * m), out=p)
    torch.add(b2 * m, a2 * g, out=mu)
