"""Layer-wise rates: LAMB, LARS and Fromage scale each leaf's update by the norms of the leaf and of the update."""
import math
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import requires_grad
from fspeed.optim.adam import scale_by_adam
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, require_params, stateless
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights, decay_now
from fspeed.optim.fused import fixed, in_one_pass, number, rate_for, rows_by
from fspeed.optim.kernels import ready
from fspeed.optim.leaves import LEAF, as_function, by_leaf, spread
from fspeed.optim.masking import Mask, masked
from fspeed.optim.moments import correction, wide
from fspeed.optim.norms import leaf_norms, leaf_rms, safe_sqrt, summed
from fspeed.optim.scale import rate_now, scale_by_learning_rate, times
from fspeed.optim.sgd import trace
from fspeed.shard.pytree import tree_map


def scale_by_trust_ratio(
    min_norm: Number = 0.0, trust_coefficient: Number = 1.0, eps: Number = 0.0,
    *, min_ratio: Number = 0.0, max_ratio: Number = math.inf,
) -> GradientTransformation:
    """Scale each leaf's update by the leaf's norm over the update's.

        u ratio,    ratio = trust_coefficient max(norm(p), min_norm) / (max(norm(u), min_norm) + eps), within [min_ratio, max_ratio]

    The ratio is 1 where either norm is 0.

    Args:
        min_norm: the least norm that counts.
        trust_coefficient, eps: as above.
        min_ratio, max_ratio: bounds of the ratio; optax has none, DeepSpeed 0.01 and 10.

    Cost: two passes over the updates and one over the parameters, and two numbers a leaf summed over each mesh axis.

    Source: You et al., arXiv 1904.00962.

    >>> scale_by_trust_ratio().update(torch.tensor([3., 4.]), (), torch.tensor([6., 8.]))[0]
    tensor([6., 8.])
    """
    def run(updates: Any, params: Any) -> Any:
        require_params(params, "scale_by_trust_ratio")
        of_p, of_u = leaf_norms(params, updates).clamp(min=min_norm)
        ratio = trust_ratio(of_p, of_u, trust_coefficient, eps, min_ratio, max_ratio)
        return by_leaf(times, list(ratio.unbind()), updates)

    return stateless(run)


def trust_ratio(of_p: Tensor, of_u: Tensor, coefficient: Any, eps: Any, least: Any, most: Any) -> Tensor:
    """The ratio of `scale_by_trust_ratio` from the norms of leaves and of their updates."""
    ratio = coefficient * of_p / torch.where(of_u + eps == 0, 1, of_u + eps)
    return torch.where((of_p == 0) | (of_u == 0), 1, ratio.clamp(least, most))


def scale_by_param_block_norm(min_scale: Number = 1e-3) -> GradientTransformation:
    """Scale each leaf's update by the leaf's norm.

        u max(norm(p), min_scale)

    Args:
        min_scale: the least factor.

    Cost: a pass over updates and parameters each, and one number a leaf summed over each mesh axis.

    >>> scale_by_param_block_norm().update(torch.tensor([1., 1.]), (), torch.tensor([3., 4.]))[0]
    tensor([5., 5.])
    """
    return stateless(lambda updates, params: _by_params(leaf_norms, min_scale, updates, params))


def scale_by_param_block_rms(min_scale: Number = 1e-3) -> GradientTransformation:
    """Scale each leaf's update by the leaf's root mean square.

        u max(rms(p), min_scale)

    Args:
        min_scale: the least factor.

    Cost: a pass over updates and parameters each, and one number a leaf summed over each mesh axis.

    >>> scale_by_param_block_rms().update(torch.tensor([1., 1.]), (), torch.tensor([3., 3.]))[0]
    tensor([3., 3.])
    """
    return stateless(lambda updates, params: _by_params(leaf_rms, min_scale, updates, params))


def _by_params(size: Any, min_scale: Any, updates: Any, params: Any) -> Any:
    require_params(params, "scale_by_param_block_norm and _rms")
    return by_leaf(times, list(size(params).squeeze(0).clamp(min=min_scale).unbind()), updates)


# ---------------------------------------------------------------- optimizers
def lamb(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-6, eps_root: Number = 0.0,
    weight_decay: NumberOrSchedule = 0.0, mask: Mask | None = None,
    *, min_ratio: Number = 0.0, max_ratio: Number = math.inf, debias_rate: bool = False,
) -> GradientTransformation:
    """LAMB: Adam whose steps are in proportion to each leaf's norm.

        u = mu_hat / (sqrt(nu_hat) + eps) + weight_decay p
        p - learning_rate ratio u,    ratio = norm(p) / norm(u) within [min_ratio, max_ratio], 1 if either norm is 0

    DeepSpeed's form, `lamb(lr, eps=1e-8, min_ratio=.01, max_ratio=10, debias_rate=True)`, has mu and nu themselves in u, and
    learning_rate sqrt(1 - b2^t) / (1 - b1^t) in place of learning_rate.

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root: as for `scale_by_adam`.
        weight_decay, mask: as for `add_decayed_weights`.
        min_ratio, max_ratio: bounds of the ratio.
        debias_rate: correct the bias of the means in the learning rate, not in them.

    Cost: two numbers kept for each parameter, and two numbers a leaf summed over each mesh axis; it steps in place, in two passes
        that read seven and write three.

    Source: You et al., arXiv 1904.00962.

    >>> opt = lamb(.1)
    >>> params = torch.tensor([1., 1.])
    >>> opt.update(torch.tensor([2., -.1]), opt.init(params), params)[0].round(decimals=3)
    tensor([-0.1000,  0.1000])
    """
    plain = chain(
        scale_by_adam(b1, b2, eps, eps_root, debias=not debias_rate), add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(min_ratio=min_ratio, max_ratio=max_ratio), scale_by_learning_rate(learning_rate),
    )
    def update(updates: Any, state: tuple, params: Any = None) -> tuple[Any, tuple]:
        updates, new = plain.update(updates, state, params)
        by = correction(b2, new[0].count).sqrt() / correction(b1, new[0].count)
        return tree_map(lambda u: times(by, u), updates), new

    decays = (lambda params: True) if mask is None else as_function(mask)

    def fused(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple] | None:
        moments, rate, decay = state[0], rate_now(learning_rate, state[3]), decay_now(weight_decay, state[1])
        found = rows_by(LEAF, params, grads, moments.mu, moments.nu)
        if found is None or rate_for(rate[0], moments.count.device) is None or requires_grad(decay[0]):
            return None
        count = increment(moments.count)
        c1, c2 = number(correction(b1, count)), number(correction(b2, count))
        by, over_c1, over_c2 = (c2**0.5 / c1, 1.0, 1.0) if debias_rate else (1.0, 1 / c1, 1 / c2)
        each = [(over_c1, over_c2, eps, eps_root, decay[0] if yes else 0.0) for yes in spread(decays, params)]
        nothing = torch.zeros(2, dtype=torch.float64, device=moments.count.device)
        squares = [nothing] * len(each)
        average, move = (ready(kernel, [row for _, row in found]) for kernel in (_averaged, _moved))
        for leaf, row in found:
            mine = average(row, b1, 1 - b1, b2, 1 - b2, *each[leaf.number])
            squares[leaf.number] = squares[leaf.number] + mine.to(nothing) / leaf.holders
        of_p, of_u = safe_sqrt(summed(torch.stack(squares, 1), params))
        ratios = trust_ratio(of_p, of_u, 1.0, 0.0, min_ratio, max_ratio)
        scales = (rate[0] * by * ratios).unbind()
        for leaf, (p, _, mu, nu) in found:
            move((p, mu, nu), scales[leaf.number], *each[leaf.number])
        return params, (type(moments)(count, moments.mu, moments.nu), decay[1], state[2], rate[1])

    whole = GradientTransformation(plain.init, update) if debias_rate else plain
    return in_one_pass(whole, fused) if fixed(b1, b2, eps, eps_root, min_ratio, max_ratio) else whole


def _averaged(p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, numbers: tuple) -> Tensor:
    """New moments; and the squared norms of the parameters and of their update."""
    b1, a1, b2, a2, *rest = numbers
    g = wide(g)
    torch.add(b1 * wide(mu), a1 * g, out=mu)
    torch.add(b2 * wide(nu), a2 * g * g, out=nu)
    return torch.stack([wide(p).square().sum(), _update(p, mu, nu, *rest).square().sum()])


def _moved(p: Tensor, mu: Tensor, nu: Tensor, numbers: tuple) -> None:
    scale, *rest = numbers
    torch.sub(wide(p), scale * _update(p, mu, nu, *rest), out=p)


def _update(p: Tensor, mu: Tensor, nu: Tensor, over_c1: Any, over_c2: Any, eps: Any, eps_root: Any, wd: Any) -> Tensor:
    return wide(mu) * over_c1 / ((wide(nu) * over_c2 + eps_root).sqrt() + eps) + wd * wide(p)


def lars(
    learning_rate: NumberOrSchedule, weight_decay: NumberOrSchedule = 0.0, weight_decay_mask: Mask = True,
    trust_coefficient: Number = 0.001, eps: Number = 0.0, trust_ratio_mask: Mask = True, momentum: Number = 0.9,
    nesterov: bool = False,
) -> GradientTransformation:
    """LARS: gradient descent with momentum whose steps are in proportion to each leaf's norm.

        u = g + weight_decay p
        t = momentum t - learning_rate trust_coefficient norm(p) / (norm(u) + eps) u
        p + t

    Args:
        learning_rate: a number or a schedule.
        weight_decay, weight_decay_mask: as for `add_decayed_weights`.
        trust_coefficient, eps: as for `scale_by_trust_ratio`.
        trust_ratio_mask: which leaves are scaled by it, as for `masked`.
        momentum, nesterov: as for `trace`.

    Cost: one number kept for each parameter, and two numbers a leaf summed over each mesh axis.

    Source: You et al., arXiv 1708.03888.

    >>> opt = lars(1., trust_coefficient=.5)
    >>> params = torch.tensor([3., 4.])
    >>> opt.update(torch.tensor([6., 8.]), opt.init(params), params)[0]
    tensor([-1.5000, -2.0000])
    """
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        masked(scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps), trust_ratio_mask),
        scale_by_learning_rate(learning_rate), trace(momentum, nesterov),
    )


def fromage(learning_rate: NumberOrSchedule, min_norm: Number = 1e-6) -> GradientTransformation:
    """Fromage: steps of a fixed angle in each leaf.

        (p - learning_rate norm(p) / norm(g) g) / sqrt(1 + learning_rate^2)

    Args:
        learning_rate: a number or a schedule.
        min_norm: the least norm that counts.

    Cost: nothing kept but a schedule's count, and two numbers a leaf summed over each mesh axis.

    Source: Bernstein et al., arXiv 2002.03432.

    >>> opt = fromage(.75)
    >>> params = torch.tensor([3., 4.])
    >>> opt.update(torch.tensor([6., 8.]), opt.init(params), params)[0]
    tensor([-2.4000, -3.2000])
    """
    shrink = lambda lr: 1 / (1 + lr**2) ** 0.5
    if callable(learning_rate):
        rate, decay = (lambda c: shrink(learning_rate(c)) * learning_rate(c)), (lambda c: shrink(learning_rate(c)) - 1)
    else:
        rate, decay = learning_rate * shrink(learning_rate), shrink(learning_rate) - 1
    return chain(scale_by_trust_ratio(min_norm), scale_by_learning_rate(rate), add_decayed_weights(decay))
