"""AdEMAMix: a fast and a slow mean of gradients."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count, value_at
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.masking import Mask
from fspeed.optim.moments import bias_correction, kept, over_root, update_moment, update_second_moment, zeros
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


class ScaleByAdemamixState(NamedTuple):
    """The numbers of updates (int32), a fast and a slow moving average of gradients, and that of their squares."""
    count: Tensor       # type: ignore[assignment]
    count_m2: Tensor
    m1: Any
    m2: Any
    nu: Any


def scale_by_ademamix(
    b1: Number = 0.9, b2: Number = 0.999, b3: NumberOrSchedule = 0.9999, alpha: NumberOrSchedule = 6.0, eps: Number = 1e-8,
    eps_root: Number = 0.0, mu_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """`scale_by_adam` with a second, slow moving average.

        m1, m2, nu = moving averages, by b1, b3, b2, of g, g, |g|^2;    u = (m1_hat + alpha m2) / (sqrt(nu_hat + eps_root) + eps)

    Args:
        b1, b2, b3: how slowly the means forget; b3 may be a schedule.
        alpha: how much of the slow mean is in the update: a number or a schedule.
        eps, eps_root: as for `scale_by_adam`.
        mu_dtype: what all three are kept in; by default as the parameters.

    Cost: three numbers kept for each parameter.

    Source: Pagliardini et al., arXiv 2409.03137.

    >>> opt = scale_by_ademamix()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1.0006, -1.0006])
    """
    def init(params: Any) -> ScaleByAdemamixState:
        return ScaleByAdemamixState(new_count(params), new_count(params), *(zeros(params, mu_dtype) for _ in range(3)))

    def update(updates: Any, state: ScaleByAdemamixState, params: Any = None) -> tuple[Any, ScaleByAdemamixState]:
        slow, much = value_at(b3, state.count_m2), value_at(alpha, state.count_m2)
        m1, m2 = update_moment(updates, state.m1, b1), update_moment(updates, state.m2, slow)
        nu, count = update_second_moment(updates, state.nu, b2), increment(state.count)
        mean = tree_map(lambda a, b: a + much * b, bias_correction(m1, b1, count), m2)
        out = over_root(updates, mean, bias_correction(nu, b2, count), eps, eps_root)
        return out, kept(state, m1=m1, m2=m2, nu=nu)._replace(count=count, count_m2=increment(state.count_m2))

    return GradientTransformation(init, update)


def ademamix(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, b3: NumberOrSchedule = 0.9999,
    alpha: NumberOrSchedule = 5.0, eps: Number = 1e-8, eps_root: Number = 0.0, mu_dtype: torch.dtype | None = None,
    weight_decay: NumberOrSchedule = 0.0, mask: Mask | None = None,
) -> GradientTransformation:
    """AdEMAMix.

        p - learning_rate (u + weight_decay p),    u as in `scale_by_ademamix`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, b3, alpha, eps, eps_root, mu_dtype: as for `scale_by_ademamix`.
        weight_decay, mask: as for `add_decayed_weights`.

    Cost: three numbers kept for each parameter.

    Source: Pagliardini et al., arXiv 2409.03137.

    >>> opt = ademamix(.1)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)), torch.zeros(2))[0]
    tensor([-0.1000,  0.1000])
    """
    return chain(
        scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root, mu_dtype), add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
