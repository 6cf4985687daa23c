"""AdaBelief: how far gradients are from their mean."""
from typing import Any, NamedTuple

from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.moments import bias_correction, debiased_mean, kept, over_root, update_moment, update_second_moment, wide, zeros
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


class ScaleByBeliefState(NamedTuple):
    """The number of updates (int32), and the moving averages of gradients and of the squares of what they did not foresee."""
    count: Tensor       # type: ignore[assignment]
    mu: Any
    nu: Any


def scale_by_belief(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-16, eps_root: Number = 1e-16, *, nesterov: bool = False,
) -> GradientTransformation:
    """Divide the mean of gradients by how far gradients are from it.

        mu = b1 mu + (1 - b1) g;    nu = b2 nu + (1 - b2) |g - mu|^2 + eps_root;    u = mu_hat / (sqrt(nu_hat) + eps)

    Args:
        b1, b2: how slowly the means forget.
        eps, eps_root: what is added to the root, and to nu at each update.
        nesterov: as for `scale_by_adam`.

    Cost: two numbers kept for each parameter.

    Source: Zhuang et al., arXiv 2010.07468.

    >>> import torch
    >>> opt = scale_by_belief()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1.1111, -1.1111])
    """
    def init(params: Any) -> ScaleByBeliefState:
        return ScaleByBeliefState(new_count(params), zeros(params), zeros(params))

    def update(updates: Any, state: ScaleByBeliefState, params: Any = None) -> tuple[Any, ScaleByBeliefState]:
        mu, count = update_moment(updates, state.mu, b1), increment(state.count)
        unforeseen = tree_map(lambda g, m: wide(g) - m, updates, mu)
        nu = tree_map(lambda v: v + eps_root, update_second_moment(unforeseen, state.nu, b2))
        mu_hat = debiased_mean(updates, mu, b1, count, nesterov)
        return over_root(updates, mu_hat, bias_correction(nu, b2, count), eps), kept(state, mu=mu, nu=nu)._replace(count=count)

    return GradientTransformation(init, update)


def adabelief(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-16, eps_root: Number = 1e-16,
    *, nesterov: bool = False,
) -> GradientTransformation:
    """AdaBelief.

        p - learning_rate u,    u as in `scale_by_belief`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root, nesterov: as for `scale_by_belief`.

    Cost: two numbers kept for each parameter.

    Source: Zhuang et al., arXiv 2010.07468.

    >>> import torch
    >>> opt = adabelief(.9)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([-1.,  1.])
    """
    return chain(scale_by_belief(b1, b2, eps, eps_root, nesterov=nesterov), scale_by_learning_rate(learning_rate))
