"""Updates over the root of a mean, or sum, of squared gradients: Adagrad, RMSProp, Adadelta."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, identity, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.masking import Mask
from fspeed.optim.moments import abs_sq, bias_correction, full, kept, update_moment, update_second_moment, wide, zeros
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.optim.sgd import trace
from fspeed.shard.pytree import tree_map


class ScaleByRssState(NamedTuple):
    """The sums of squared gradients."""
    sum_of_squares: Any


class ScaleByRmsState(NamedTuple):
    """The moving averages of squared gradients."""
    nu: Any


class ScaleByRmsWithCountState(NamedTuple):
    """The number of updates (int32), and the moving averages of squared gradients."""
    count: Tensor       # type: ignore[assignment]
    nu: Any


class ScaleByRStdDevState(NamedTuple):
    """The moving averages of gradients and of their squares."""
    mu: Any
    nu: Any


class ScaleByRStdDevWithCountState(NamedTuple):
    """The number of updates (int32), and the moving averages of gradients and of their squares."""
    count: Tensor       # type: ignore[assignment]
    mu: Any
    nu: Any


class ScaleByAdaDeltaState(NamedTuple):
    """The moving averages of squared gradients and of squared updates."""
    e_g: Any
    e_x: Any


def scale_by_rss(initial_accumulator_value: Number = 0.1, eps: Number = 1e-7) -> GradientTransformation:
    """Divide by the root of the sum of squared gradients.

        s = s + |g|^2;    u = g / sqrt(s + eps), 0 where s is 0

    Args:
        initial_accumulator_value: the first s.
        eps: what is added inside the root.

    Cost: one number kept for each parameter.

    Source: Duchi et al., jmlr.org/papers/v12/duchi11a.

    >>> opt = scale_by_rss(0., 0.)
    >>> opt.update(torch.tensor([2., 0.]), opt.init(torch.zeros(2)))
    (tensor([1., 0.]), ScaleByRssState(sum_of_squares=tensor([4., 0.])))
    """
    def update(updates: Any, state: ScaleByRssState, params: Any = None) -> tuple[Any, ScaleByRssState]:
        total = tree_map(lambda g, s: abs_sq(wide(g)) + wide(s), updates, state.sum_of_squares)
        positive = lambda s: s.real > 0 if s.is_complex() else s > 0
        scaled = tree_map(lambda g, s: torch.where(positive(s), g * (s + eps).rsqrt(), 0).to(g.dtype), updates, total)
        return scaled, kept(state, sum_of_squares=total)

    return GradientTransformation(lambda params: ScaleByRssState(full(params, initial_accumulator_value)), update)


def scale_by_rms(
    decay: Number = 0.9, eps: Number = 1e-8, initial_scale: Number = 0.0, eps_in_sqrt: bool = True, bias_correction: bool = False,
) -> GradientTransformation:
    """Divide by the root of the mean of squared gradients.

        nu = decay nu + (1 - decay) |g|^2;    u = g / sqrt(nu + eps), or g / (sqrt(nu) + eps)

    Args:
        decay: how slowly the mean forgets.
        eps: what is added inside the root, or, without `eps_in_sqrt`, outside.
        initial_scale: the first nu.
        eps_in_sqrt: where eps is added.
        bias_correction: divide nu by 1 - decay^t; the state then has a count.

    Cost: one number kept for each parameter.

    Source: Hinton, lecture 6 of "Neural networks for machine learning", 2012.

    >>> opt = scale_by_rms(.75, 0.)
    >>> opt.update(torch.tensor([2.]), opt.init(torch.zeros(1)))
    (tensor([2.]), ScaleByRmsState(nu=tensor([1.])))
    """
    def init(params: Any) -> Any:
        nu = full(params, initial_scale)
        return ScaleByRmsWithCountState(new_count(params), nu) if bias_correction else ScaleByRmsState(nu)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        nu = update_second_moment(updates, state.nu, decay)
        new, (nu_hat,) = _counted(state, decay, nu=nu)
        return tree_map(lambda g, v: _over(g, v, eps, eps_in_sqrt), updates, nu_hat), new

    return GradientTransformation(init, update)


def scale_by_stddev(
    decay: Number = 0.9, eps: Number = 1e-8, initial_scale: Number = 0.0, eps_in_sqrt: bool = True, bias_correction: bool = False,
) -> GradientTransformation:
    """Divide by the standard deviation of gradients.

        mu = decay mu + (1 - decay) g;    nu = decay nu + (1 - decay) |g|^2;    u = g / sqrt(nu - |mu|^2 + eps)

    Args:
        decay, eps, initial_scale, eps_in_sqrt, bias_correction: as for `scale_by_rms`.

    Cost: two numbers kept for each parameter.

    Source: Hinton, as for `scale_by_rms`.

    >>> opt = scale_by_stddev(.5, 0.)
    >>> opt.update(torch.tensor([2.]), opt.init(torch.zeros(1)))[0]
    tensor([2.])
    """
    def init(params: Any) -> Any:
        mu, nu = zeros(params), full(params, initial_scale)
        return ScaleByRStdDevWithCountState(new_count(params), mu, nu) if bias_correction else ScaleByRStdDevState(mu, nu)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu, nu = update_moment(updates, state.mu, decay), update_second_moment(updates, state.nu, decay)
        new, (mu_hat, nu_hat) = _counted(state, decay, mu=mu, nu=nu)
        return tree_map(lambda g, m, v: _over(g, v - abs_sq(m), eps, eps_in_sqrt), updates, mu_hat, nu_hat), new

    return GradientTransformation(init, update)


def _over(g: Tensor, nu: Tensor, eps: Any, eps_in_sqrt: bool) -> Tensor:
    return (g * (nu + eps).rsqrt() if eps_in_sqrt else g / (nu.sqrt() + eps)).to(g.dtype)


def _counted(state: Any, decay: Any, **moments: Any) -> tuple[Any, list]:
    """The state with new moments, and the moments, their bias corrected if the state has a count."""
    new = kept(state, **moments)
    if "count" not in state._fields:
        return new, list(moments.values())
    new = new._replace(count=increment(state.count))
    return new, [bias_correction(m, decay, new.count) for m in moments.values()]


def scale_by_adadelta(rho: Number = 0.9, eps: Number = 1e-6) -> GradientTransformation:
    """Divide by the root mean square of gradients, times that of earlier updates.

        e_g = rho e_g + (1 - rho) g^2;    u = sqrt(e_x + eps) / sqrt(e_g + eps) g;    e_x = rho e_x + (1 - rho) u^2

    Args:
        rho: how slowly the means forget.
        eps: what is added inside the roots.

    Cost: two numbers kept for each parameter.

    Source: Zeiler, arXiv 1212.5701.

    >>> opt = scale_by_adadelta(.75, 1.)
    >>> opt.update(torch.tensor([2.]), opt.init(torch.zeros(1)))[0]
    tensor([1.4142])
    """
    def update(updates: Any, state: ScaleByAdaDeltaState, params: Any = None) -> tuple[Any, ScaleByAdaDeltaState]:
        e_g = tree_map(lambda g, e: (1 - rho) * wide(g) ** 2 + rho * wide(e), updates, state.e_g)
        out = tree_map(lambda g, e, x: ((wide(x) + eps).sqrt() / (e + eps).sqrt() * g).to(g.dtype), updates, e_g, state.e_x)
        e_x = tree_map(lambda u, e: (1 - rho) * wide(u) ** 2 + rho * wide(e), out, state.e_x)
        return out, kept(state, e_g=e_g, e_x=e_x)

    return GradientTransformation(lambda params: ScaleByAdaDeltaState(zeros(params), zeros(params)), update)


# ---------------------------------------------------------------- optimizers
def adagrad(learning_rate: NumberOrSchedule, initial_accumulator_value: Number = 0.1, eps: Number = 1e-7) -> GradientTransformation:
    """Adagrad.

        p - learning_rate g / sqrt(s + eps),    s as in `scale_by_rss`

    Args:
        learning_rate: a number or a schedule.
        initial_accumulator_value, eps: as for `scale_by_rss`.

    Cost: one number kept for each parameter.

    Source: Duchi et al., jmlr.org/papers/v12/duchi11a.

    >>> opt = adagrad(.1, 0., 0.)
    >>> opt.update(torch.tensor([2.]), opt.init(torch.zeros(1)))[0]
    tensor([-0.1000])
    """
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))


def rmsprop(
    learning_rate: NumberOrSchedule, decay: Number = 0.9, eps: Number = 1e-8, initial_scale: Number = 0.0,
    eps_in_sqrt: bool = True, centered: bool = False, momentum: Number | None = None, nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """RMSProp.

        p - learning_rate g / sqrt(nu + eps),    nu as in `scale_by_rms`, less |mu|^2 if centered

    Args:
        learning_rate: a number or a schedule.
        decay, eps, initial_scale, eps_in_sqrt, bias_correction: as for `scale_by_rms`.
        centered: as `scale_by_stddev`.
        momentum, nesterov: as for `trace`, of the updates; None is no momentum.

    Cost: one number kept for each parameter, one more if centered, and one more with momentum.

    Source: Hinton, as for `scale_by_rms`; Graves, arXiv 1308.0850.

    >>> opt = rmsprop(.1, .75, 0.)
    >>> opt.update(torch.tensor([2.]), opt.init(torch.zeros(1)))[0]
    tensor([-0.2000])
    """
    by = scale_by_stddev if centered else scale_by_rms
    return chain(
        by(decay, eps, initial_scale, eps_in_sqrt, bias_correction), scale_by_learning_rate(learning_rate),
        identity() if momentum is None else trace(momentum, nesterov),
    )


def adadelta(
    learning_rate: NumberOrSchedule | None = None, rho: Number = 0.9, eps: Number = 1e-6, weight_decay: NumberOrSchedule = 0.0,
    weight_decay_mask: Mask | None = None,
) -> GradientTransformation:
    """Adadelta.

        p - learning_rate u,    u as in `scale_by_adadelta`, of g + weight_decay p

    Args:
        learning_rate: a number or a schedule; None leaves u as it is, sign and all.
        rho, eps: as for `scale_by_adadelta`.
        weight_decay, weight_decay_mask: as for `add_decayed_weights`.

    Cost: two numbers kept for each parameter.

    Source: Zeiler, arXiv 1212.5701.

    >>> opt = adadelta(1., .75, 1.)
    >>> opt.update(torch.tensor([2.]), opt.init(torch.zeros(1)), torch.zeros(1))[0]
    tensor([-1.4142])
    """
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask), scale_by_adadelta(rho, eps), scale_by_learning_rate(learning_rate)
    )
