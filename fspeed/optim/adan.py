"""Adan: Nesterov's momentum by the changes of gradients."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.masking import Mask
from fspeed.optim.moments import bias_correction, kept, over_root, update_moment, update_second_moment, wide, zeros
from fspeed.optim.scale import scale_by_learning_rate
from fspeed.shard.pytree import tree_map


class ScaleByAdanState(NamedTuple):
    """The moving averages of gradients, of their changes and of squares, the last gradients, and the number of updates (int32)."""
    m: Any
    v: Any
    n: Any
    g: Any
    t: Tensor


def scale_by_adan(
    b1: Number = 0.98, b2: Number = 0.92, b3: Number = 0.99, eps: Number = 1e-8, eps_root: Number = 0.0,
) -> GradientTransformation:
    """Nesterov's momentum by the moving average of gradients' changes.

        d = g - last g;    m, v, n = moving averages, by b1, b2, b3, of g, d, |g + (1 - b2) d|^2
        u = (m_hat + (1 - b2) v_hat) / (sqrt(n_hat + eps_root) + eps)

    Args:
        b1, b2, b3: how slowly the means forget.
        eps, eps_root: what is added to the root, outside and inside.

    Cost: four numbers kept for each parameter.

    Source: Xie et al., arXiv 2208.06677.

    >>> opt = scale_by_adan()
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """
    def init(params: Any) -> ScaleByAdanState:
        return ScaleByAdanState(zeros(params), zeros(params), zeros(params), zeros(params), new_count(params))

    def update(updates: Any, state: ScaleByAdanState, params: Any = None) -> tuple[Any, ScaleByAdanState]:
        change = tree_map(lambda g, last: torch.where(state.t == 0, 0, wide(g) - wide(last)), updates, state.g)
        m, v = update_moment(updates, state.m, b1), update_moment(change, state.v, b2)
        n = update_second_moment(tree_map(lambda g, d: wide(g) + (1 - b2) * d, updates, change), state.n, b3)
        t = increment(state.t)
        m_hat, v_hat, n_hat = (bias_correction(x, b, t) for x, b in ((m, b1), (v, b2), (n, b3)))
        out = over_root(updates, tree_map(lambda m, v: m + (1 - b2) * v, m_hat, v_hat), n_hat, eps, eps_root)
        return out, kept(state, m=m, v=v, n=n, g=updates)._replace(t=t)

    return GradientTransformation(init, update)


def adan(
    learning_rate: NumberOrSchedule, b1: Number = 0.98, b2: Number = 0.92, b3: Number = 0.99, eps: Number = 1e-8,
    eps_root: Number = 1e-8, weight_decay: NumberOrSchedule = 0.0, mask: Mask | None = None,
) -> GradientTransformation:
    """Adan.

        p - learning_rate (u + weight_decay p),    u as in `scale_by_adan`

    Args:
        learning_rate: a number or a schedule.
        b1, b2, b3, eps, eps_root: as for `scale_by_adan`.
        weight_decay, mask: as for `add_decayed_weights`.

    Cost: four numbers kept for each parameter.

    Source: Xie et al., arXiv 2208.06677.

    >>> opt = adan(.1)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)), torch.zeros(2))[0]
    tensor([-0.1000,  0.1000])
    """
    return chain(
        scale_by_adan(b1, b2, b3, eps, eps_root), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
