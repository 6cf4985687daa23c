"""Yogi: a second moment that grows slowly."""
from typing import Any

from fspeed.optim.adam import ScaleByAdamState
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.moments import abs_sq, bias_correction, full, kept, over_root, update_moment, wide
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


def scale_by_yogi(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-3, eps_root: Number = 0.0, initial_accumulator_value: Number = 1e-6,
) -> GradientTransformation:
    """`scale_by_adam` with a second moment that moves by steps of the squared gradient's size.

        nu = nu - (1 - b2) sign(nu - |g|^2) |g|^2;    u = mu_hat / (sqrt(nu_hat + eps_root) + eps)

    Args:
        b1, b2, eps, eps_root: as for `scale_by_adam`.
        initial_accumulator_value: the first mu and nu.

    Cost: two numbers kept for each parameter.

    Source: Zaheer et al., papers.nips.cc/paper/8186.

    >>> import torch
    >>> opt = scale_by_yogi(eps=0., initial_accumulator_value=0.)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1.0000, -1.0000])
    """
    def init(params: Any) -> ScaleByAdamState:
        start = lambda: full(params, initial_accumulator_value)
        return ScaleByAdamState(new_count(params), start(), start())

    def update(updates: Any, state: ScaleByAdamState, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        mu, count = update_moment(updates, state.mu, b1), increment(state.count)
        step = lambda v, g2: v - (1 - b2) * (v - g2).sgn() * g2
        nu = tree_map(lambda g, v: step(wide(v), abs_sq(wide(g))), updates, state.nu)
        mu_hat, nu_hat = bias_correction(mu, b1, count), bias_correction(nu, b2, count)
        return over_root(updates, mu_hat, nu_hat, eps, eps_root), kept(state, mu=mu, nu=nu)._replace(count=count)

    return GradientTransformation(init, update)


def yogi(learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-3) -> GradientTransformation:
    """Yogi.

        p - learning_rate u,    u as in `scale_by_yogi`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps: as for `scale_by_yogi`.

    Cost: two numbers kept for each parameter.

    Source: Zaheer et al., papers.nips.cc/paper/8186.

    >>> import torch
    >>> opt = yogi(.1)
    >>> opt.update(torch.tensor([200., -10.]), opt.init(torch.zeros(2)))[0].round(decimals=3)
    tensor([-0.1000,  0.1000])
    """
    return chain(scale_by_yogi(b1, b2, eps), scale_by_learning_rate(learning_rate))
