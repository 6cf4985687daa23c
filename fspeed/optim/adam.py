"""Adam and its kin: updates by moving averages of gradients and of their squares."""
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.ops.optimizers import adamw_
from fspeed.optim import kernels
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights, decay_now
from fspeed.optim.fused import fixed, in_one_pass, lists, number, rate_for, rows
from fspeed.optim.leaves import as_function
from fspeed.optim.masking import Mask
from fspeed.optim.moments import (
    bias_correction,
    correction,
    debiased_mean,
    kept,
    over_root,
    update_moment,
    update_second_moment,
    wide,
    zeros,
)
from fspeed.optim.scale import rate_now, scale_by_learning_rate


class ScaleByAdamState(NamedTuple):
    """The number of updates (int32), and the moving averages of gradients and of their squares."""
    count: Tensor       # type: ignore[assignment]
    mu: Any
    nu: Any


def adam_state(params: Any, mu_dtype: torch.dtype | None = None) -> ScaleByAdamState:
    """The state before the first update."""
    return ScaleByAdamState(new_count(params), zeros(params, mu_dtype), zeros(params))


def scale_by_adam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0, mu_dtype: torch.dtype | None = None,
    *, nesterov: bool = False, debias: bool = True,
) -> GradientTransformation:
    """Divide the mean of gradients by the root of the mean of their squares.

        mu = b1 mu + (1 - b1) g
        nu = b2 nu + (1 - b2) |g|^2
        u = mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t) + eps_root) + eps)

    Args:
        b1, b2: how slowly the means forget.
        eps, eps_root: what is added to the root, outside and inside.
        mu_dtype: what mu is kept in; by default as the parameters.
        nesterov: use b1 mu / (1 - b1^(t+1)) + (1 - b1) g / (1 - b1^t) in place of mu / (1 - b1^t).
        debias: divide by 1 - b^t; False leaves that out.

    Cost: two numbers kept for each parameter.

    Source: Kingma and Ba, arXiv 1412.6980.

    >>> opt = scale_by_adam()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """
    def update(updates: Any, state: ScaleByAdamState, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        mu = update_moment(updates, state.mu, b1)
        nu = update_second_moment(updates, state.nu, b2)
        count = increment(state.count)
        new = kept(state, mu=mu, nu=nu)._replace(count=count)
        if debias:
            mu, nu = debiased_mean(updates, mu, b1, count, nesterov), bias_correction(nu, b2, count)
        return over_root(updates, mu, nu, eps, eps_root), new

    return GradientTransformation(lambda params: adam_state(params, mu_dtype), update)


def adam(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0,
    mu_dtype: torch.dtype | None = None, *, nesterov: bool = False,
) -> GradientTransformation:
    """Adam.

        p - learning_rate mu_hat / (sqrt(nu_hat) + eps),    mu_hat and nu_hat as in `scale_by_adam`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root, mu_dtype, nesterov: as for `scale_by_adam`.

    Returns:
        A transformation; with `eps_root=0`, `nesterov=False` and `mu_dtype=None` it steps in one pass.

    Cost: two numbers kept for each parameter; in one pass it reads four and writes three.

    Source: Kingma and Ba, arXiv 1412.6980.

    >>> opt = adam(.1)
    >>> params = torch.tensor([1., 1.])
    >>> opt.apply(torch.tensor([2., -.1]), opt.init(params), params)[0]
    tensor([0.9000, 1.1000])
    """
    plain = chain(scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov), scale_by_learning_rate(learning_rate))

    def fused(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple] | None:
        lr, rate = rate_now(learning_rate, state[1])
        moved = _fused(grads, state[0], params, lr, b1, b2, eps, 0.0, None)
        return moved and (params, (moved, rate))

    return in_one_pass(plain, fused) if _fusable(b1, b2, eps, eps_root, mu_dtype, nesterov) else plain


def adamw(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0,
    mu_dtype: torch.dtype | None = None, weight_decay: NumberOrSchedule = 1e-4, mask: Mask | None = None,
    *, nesterov: bool = False,
) -> GradientTransformation:
    """Adam with weight decay that goes round the moments.

        p - learning_rate (mu_hat / (sqrt(nu_hat) + eps) + weight_decay p),    mu_hat and nu_hat as in `scale_by_adam`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root, mu_dtype, nesterov: as for `scale_by_adam`.
        weight_decay, mask: as for `add_decayed_weights`.

    Returns:
        A transformation; with `eps_root=0`, `nesterov=False` and `mu_dtype=None` it steps in one pass.

    Cost: two numbers kept for each parameter; in one pass it reads four and writes three.

    Source: Loshchilov and Hutter, arXiv 1711.05101.

    >>> opt = adamw(.1, weight_decay=.5)
    >>> params = torch.tensor([1., 1.])
    >>> opt.apply(torch.tensor([2., -.1]), opt.init(params), params)[0]
    tensor([0.8500, 1.0500])
    """
    plain = chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov), add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
    decays = None if mask is None else as_function(mask)

    def fused(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple] | None:
        lr, rate = rate_now(learning_rate, state[2])
        wd, decay = decay_now(weight_decay, state[1])
        moved = _fused(grads, state[0], params, lr, b1, b2, eps, number(wd), decays)
        return moved and (params, (moved, decay, rate))

    return in_one_pass(plain, fused) if _fusable(b1, b2, eps, eps_root, mu_dtype, nesterov) else plain


def _fusable(b1: Any, b2: Any, eps: Any, eps_root: Any, mu_dtype: Any, nesterov: bool) -> bool:
    return fixed(b1, b2, eps, eps_root) and eps_root == 0 and mu_dtype is None and not nesterov


@torch.no_grad()
def _fused(
    grads: Any, state: ScaleByAdamState, params: Any, lr: Any, b1: Any, b2: Any, eps: Any, wd: Any, mask: Mask | None,
) -> ScaleByAdamState | None:
    """Write over params and moments; None, and nothing is written, where torch's kernel does not fit."""
    found = rows(mask, params, grads, state.mu, state.nu)
    if found is None or not fixed(wd):
        return None
    count = increment(state.count)
    if kernels.triton([row for _, row in found]):
        return _on_gpu(found, state._replace(count=count), rate_for(lr, count.device), b1, b2, eps, wd)
    if found and all(row[0].is_cpu and row[0].numel() >= kernels.LONG for _, row in found) and kernels.compiles():
        return _compiled(found, state._replace(count=count), rate_for(lr, count.device), b1, b2, eps, wd)
    for decays, (ps, gs, mus, nus) in lists(found):
        rate = rate_for(lr, ps[0].device)
        if rate is None:
            return None
        steps = [count.to(ps[0].device, torch.float32)] * len(ps)
        torch._fused_adamw_(
            ps, gs, mus, nus, [], steps, lr=rate, beta1=b1, beta2=b2, weight_decay=wd if decays else 0.0, eps=eps,
            amsgrad=False, maximize=False,
        )
    return ScaleByAdamState(count, state.mu, state.nu)


def _on_gpu(found: list, state: ScaleByAdamState, rate: Any, b1: Any, b2: Any, eps: Any, wd: Any) -> ScaleByAdamState | None:
    """The same by Triton's kernel."""
    if rate is None:
        return None
    power1, power2 = (1 - correction(b, state.count) for b in (b1, b2))
    for decays, row in found:
        adamw_(
            *kernels.flat(row), rate=rate, power1=power1, power2=power2, b1=b1, b2=b2, eps=eps, weight_decay=wd if decays else 0.0,
        )
    return state


def _compiled(found: list, state: ScaleByAdamState, rate: Any, b1: Any, b2: Any, eps: Any, wd: Any) -> ScaleByAdamState | None:
    """The same by a kernel made for this machine, with the corrections of bias in the rate and in eps."""
    if rate is None:
        return None
    c1, c2 = correction(b1, state.count).item(), correction(b2, state.count).sqrt().item()
    run = kernels.ready(_descend, [row for _, row in found])
    for decays, row in found:
        run(row, b1, 1 - b1, b2, 1 - b2, rate * c2 / c1, eps * c2, 1 - rate * wd if decays else 1.0)
    return state


def _descend(p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, numbers: tuple) -> None:
    b1, a1, b2, a2, rate, eps, shrink = numbers
    g = wide(g)
    m, n = b1 * wide(mu) + a1 * g, b2 * wide(nu) + a2 * g * g
    torch.sub(shrink * wide(p), rate * m / (n.sqrt() + eps), out=p)
    torch.add(m, 0, out=mu)
    torch.add(n, 0, out=nu)


nadam = partial(adam, nesterov=True)
nadamw = partial(adamw, nesterov=True)
