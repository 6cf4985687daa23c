"""Adamax: the infinity norm in place of the second moment."""
from typing import Any

import torch

from fspeed.optim.adam import ScaleByAdamState, adam_state
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.masking import Mask
from fspeed.optim.moments import bias_correction, kept, update_moment, wide
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


def scale_by_adamax(b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8) -> GradientTransformation:
    """Divide the mean of gradients by the greatest of them, which decays.

        mu = b1 mu + (1 - b1) g;    nu = max(|g| + eps, b2 nu);    u = mu / (1 - b1^t) / nu

    Args:
        b1, b2: how slowly the mean and the greatest forget.
        eps: the least divisor.

    Cost: two numbers kept for each parameter.

    Source: Kingma and Ba, arXiv 1412.6980.

    >>> opt = scale_by_adamax()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """
    def update(updates: Any, state: ScaleByAdamState, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        mu, count = update_moment(updates, state.mu, b1), increment(state.count)
        nu = tree_map(lambda g, v: torch.maximum(wide(g).abs() + eps, b2 * wide(v)), updates, state.nu)
        out = tree_map(lambda u, m, v: (m / v).to(u.dtype), updates, bias_correction(mu, b1, count), nu)
        return out, kept(state, mu=mu, nu=nu)._replace(count=count)

    return GradientTransformation(adam_state, update)


def adamax(learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8) -> GradientTransformation:
    """Adamax.

        p - learning_rate u,    u as in `scale_by_adamax`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps: as for `scale_by_adamax`.

    Cost: two numbers kept for each parameter.

    Source: Kingma and Ba, arXiv 1412.6980.

    >>> opt = adamax(.1)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])
    """
    return chain(scale_by_adamax(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamaxw(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8,
    weight_decay: NumberOrSchedule = 1e-4, mask: Mask | None = None,
) -> GradientTransformation:
    """Adamax with weight decay that goes round the moments.

        p - learning_rate (u + weight_decay p),    u as in `scale_by_adamax`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps: as for `scale_by_adamax`.
        weight_decay, mask: as for `add_decayed_weights`.

    Cost: two numbers kept for each parameter.

    Source: Loshchilov and Hutter, arXiv 1711.05101.

    >>> opt = adamaxw(.1, weight_decay=.5)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.ones(2)), torch.ones(2))[0]
    tensor([-0.1500,  0.0500])
    """
    return chain(scale_by_adamax(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))
