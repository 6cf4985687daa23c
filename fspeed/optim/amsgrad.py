"""AMSGrad: the greatest second moment so far."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.moments import bias_correction, kept, over_root, update_moment, update_second_moment, wide, zeros
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


class ScaleByAmsgradState(NamedTuple):
    """The number of updates (int32), the moving averages of gradients and of their squares, and the greatest of the latter."""
    count: Tensor       # type: ignore[assignment]
    mu: Any
    nu: Any
    nu_max: Any


def scale_by_amsgrad(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0, mu_dtype: torch.dtype | None = None,
    bias_correction_mu: bool = True, bias_correction_nu: bool = True,
) -> GradientTransformation:
    """`scale_by_adam` with the greatest second moment so far.

        u = mu_hat / (sqrt(max(nu_hat so far) + eps_root) + eps)

    Args:
        b1, b2, eps, eps_root, mu_dtype: as for `scale_by_adam`.
        bias_correction_mu, bias_correction_nu: whether mu and nu are divided by 1 - b^t.

    Cost: three numbers kept for each parameter.

    Source: Reddi et al., arXiv 1904.09237.

    >>> opt = scale_by_amsgrad()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """
    def init(params: Any) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(new_count(params), zeros(params, mu_dtype), zeros(params), zeros(params))

    def update(updates: Any, state: ScaleByAmsgradState, params: Any = None) -> tuple[Any, ScaleByAmsgradState]:
        mu, nu = update_moment(updates, state.mu, b1), update_second_moment(updates, state.nu, b2)
        count = increment(state.count)
        mu_hat = bias_correction(mu, b1, count) if bias_correction_mu else mu
        nu_hat = bias_correction(nu, b2, count) if bias_correction_nu else nu
        nu_max = tree_map(lambda old, new: torch.maximum(wide(old), new), state.nu_max, nu_hat)
        return over_root(updates, mu_hat, nu_max, eps, eps_root), kept(state, mu=mu, nu=nu, nu_max=nu_max)._replace(count=count)

    return GradientTransformation(init, update)


def amsgrad(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0,
    mu_dtype: torch.dtype | None = None, bias_correction_mu: bool = True, bias_correction_nu: bool = True,
) -> GradientTransformation:
    """AMSGrad.

        p - learning_rate u,    u as in `scale_by_amsgrad`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root, mu_dtype, bias_correction_mu, bias_correction_nu: as for `scale_by_amsgrad`.

    Cost: three numbers kept for each parameter.

    Source: Reddi et al., arXiv 1904.09237.

    >>> opt = amsgrad(.1)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])
    """
    by = scale_by_amsgrad(b1, b2, eps, eps_root, mu_dtype, bias_correction_mu, bias_correction_nu)
    return chain(by, scale_by_learning_rate(learning_rate))
