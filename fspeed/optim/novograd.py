"""NovoGrad: one second moment a leaf."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count, require_params
from fspeed.optim.combine import chain
from fspeed.optim.leaves import by_leaf, numbers
from fspeed.optim.moments import cast_like, wide, zeros
from fspeed.optim.norms import leaf_norms
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.optim.wholes import outline
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


class ScaleByNovogradState(NamedTuple):
    """The number of updates (int32), the sums of normed gradients, and each whole leaf's mean square norm."""
    count: Tensor       # type: ignore[assignment]
    mu: Any
    nu: Any


def scale_by_novograd(
    b1: Number = 0.9, b2: Number = 0.25, eps: Number = 1e-8, eps_root: Number = 0.0, weight_decay: Number = 0.0,
    mu_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Momentum of gradients that are divided by their leaf's norm.

        nu = b2 nu + (1 - b2) norm(g)^2, at first norm(g)^2
        mu = b1 mu + g / (sqrt(nu + eps_root) + eps) + weight_decay p

    Args:
        b1: how much of mu stays.
        b2: how slowly nu forgets.
        eps, eps_root: what is added to the root, outside and inside.
        weight_decay: a number.
        mu_dtype: what mu is kept in; by default as the parameters.

    Cost: one number kept for each parameter, and one a leaf, which is summed over each mesh axis.

    Source: Ginsburg et al., arXiv 1905.11286.

    >>> opt = scale_by_novograd()
    >>> opt.update(torch.tensor([3., 4.]), opt.init(torch.zeros(2)), torch.zeros(2))[0]
    tensor([0.6000, 0.8000])
    """
    def init(params: Any) -> ScaleByNovogradState:
        count = new_count(params)
        nu = tree_map(lambda p: torch.zeros((), dtype=p.dtype, device=count.device), outline(params))
        return ScaleByNovogradState(count, zeros(params, mu_dtype), nu)

    def update(updates: Any, state: ScaleByNovogradState, params: Any = None) -> tuple[Any, ScaleByNovogradState]:
        require_params(params, "scale_by_novograd")
        first, squares = state.count == 0, list(leaf_norms(updates).squeeze(0).square().unbind())
        old, spec = tree_flatten(state.nu)
        at = [i for group in numbers(updates) for i in group]
        new = [torch.where(first, squares[i], b2 * wide(v) + (1 - b2) * squares[i]) for i, v in zip(at, old, strict=True)]
        nu = tree_unflatten(spec, [x.to(v.dtype) for x, v in zip(new, old, strict=True)])
        roots = dict(zip(at, (1 / ((wide(v) + eps_root).sqrt() + eps) for v in tree_leaves(nu)), strict=True))
        normed = by_leaf(lambda r, g: wide(g) * r, [roots.get(i, s) for i, s in enumerate(squares)], updates)
        mu = tree_map(lambda m, g, p: b1 * wide(m) + g + weight_decay * wide(p), state.mu, normed, params)
        return cast_like(mu, updates), ScaleByNovogradState(increment(state.count), cast_like(mu, state.mu), nu)

    return GradientTransformation(init, update)


def novograd(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.25, eps: Number = 1e-6, eps_root: Number = 0.0,
    weight_decay: Number = 0.0,
) -> GradientTransformation:
    """NovoGrad.

        p - learning_rate mu,    mu as in `scale_by_novograd`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, eps_root, weight_decay: as for `scale_by_novograd`.

    Cost: one number kept for each parameter, and one a leaf, which is summed over each mesh axis.

    Source: Ginsburg et al., arXiv 1905.11286.

    >>> opt = novograd(.5)
    >>> opt.update(torch.tensor([3., 4.]), opt.init(torch.zeros(2)), torch.zeros(2))[0]
    tensor([-0.3000, -0.4000])
    """
    return chain(scale_by_novograd(b1, b2, eps, eps_root, weight_decay), scale_by_learning_rate(learning_rate))
