"""RAdam: Adam with its variance at the start rectified."""
from typing import Any

import torch

from fspeed.optim.adam import ScaleByAdamState, adam_state
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment
from fspeed.optim.combine import chain
from fspeed.optim.moments import (
    bias_correction,
    correction,
    debiased_mean,
    kept,
    over_root,
    update_moment,
    update_second_moment,
)
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


def scale_by_radam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0, threshold: Number = 5.0,
    *, nesterov: bool = False,
) -> GradientTransformation:
    """`scale_by_adam` with its variance at the start rectified.

        u = r mu_hat / (sqrt(nu_hat + eps_root) + eps) where ro >= threshold, else mu_hat
        ro_inf = 2 / (1 - b2) - 1;    ro = ro_inf - 2 t b2^t / (1 - b2^t)
        r = sqrt((ro - 4) (ro - 2) ro_inf / ((ro_inf - 4) (ro_inf - 2) ro))

    Args:
        b1, b2, eps, eps_root, nesterov: as for `scale_by_adam`.
        threshold: the least ro at which the second moment is used.

    Cost: two numbers kept for each parameter.

    Source: Liu et al., arXiv 1908.03265.

    >>> opt = scale_by_radam()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 2.0000, -0.1000])
    """
    limit = 2 / (1 - b2) - 1

    def update(updates: Any, state: ScaleByAdamState, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        mu, nu = update_moment(updates, state.mu, b1), update_second_moment(updates, state.nu, b2)
        count = increment(state.count)
        left = correction(b2, count)
        ro = limit - 2 * count * (1 - left) / left
        by = torch.where(ro >= threshold, (ro - 4) * (ro - 2) * limit / ((limit - 4) * (limit - 2) * ro), 1).sqrt()
        mu_hat = debiased_mean(updates, mu, b1, count, nesterov)
        scaled = over_root(updates, mu_hat, bias_correction(nu, b2, count), eps, eps_root)
        out = tree_map(lambda u, m: torch.where(ro >= threshold, by * u, m).to(u.dtype), scaled, mu_hat)
        return out, kept(state, mu=mu, nu=nu)._replace(count=count)

    return GradientTransformation(adam_state, update)


def radam(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0,
    threshold: Number = 5.0, *, nesterov: bool = False,
) -> GradientTransformation:
    """Rectified Adam.

        p - learning_rate u,    u as in `scale_by_radam`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root, threshold, nesterov: as for `scale_by_radam`.

    Cost: two numbers kept for each parameter.

    Source: Liu et al., arXiv 1908.03265.

    >>> opt = radam(.1)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([-0.2000,  0.0100])
    """
    return chain(scale_by_radam(b1, b2, eps, eps_root, threshold, nesterov=nesterov), scale_by_learning_rate(learning_rate))
