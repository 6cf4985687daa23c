"""Updates that are not finite."""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, increment, new_count
from fspeed.optim.moments import near
from fspeed.optim.norms import all_finite
from fspeed.shard.pytree import tree_map


class ApplyIfFiniteState(NamedTuple):
    """Skipped updates in a row and in all (int32), whether the last was finite (bool), and the state of what is guarded."""
    notfinite_count: Tensor
    last_finite: Tensor
    total_notfinite: Tensor
    inner_state: Any


def apply_if_finite(inner: GradientTransformation, max_consecutive_errors: int) -> GradientTransformation:
    """A transformation that does nothing where an update on any rank is inf or NaN, until that happens too often in a row.

    Its updates are then zero, and its state, with all its counts, stays as it was.

    Args:
        inner: what to guard.
        max_consecutive_errors: how many updates in a row may be skipped; the next goes through as it is.

    Cost: one read of the updates, one of the state, and one number summed over each mesh axis. To skip a whole step, with what
        transforms remember, use `fs.skip_nonfinite`.

    >>> from fspeed.optim.scale import scale
    >>> opt = apply_if_finite(scale(2.), 5)
    >>> opt.update(torch.tensor([1., torch.inf]), opt.init(torch.zeros(2)))[0]
    tensor([0., 0.])
    """
    def init(params: Any) -> ApplyIfFiniteState:
        none = new_count(params)
        return ApplyIfFiniteState(none, none == 0, none.clone(), inner.init(params))

    def update(updates: Any, state: ApplyIfFiniteState, params: Any = None) -> tuple[Any, ApplyIfFiniteState]:
        finite = all_finite(updates)
        in_a_row = torch.where(finite, 0, increment(state.notfinite_count))
        go = finite | (in_a_row > max_consecutive_errors)
        out, inner_state = inner.update(updates, state.inner_state, params)
        return tree_map(lambda u: torch.where(near(go, u), u, 0), out), ApplyIfFiniteState(
            in_a_row, finite, torch.where(finite, state.total_notfinite, increment(state.total_notfinite)),
            tree_map(lambda new, old: torch.where(near(go, new), new, old), inner_state, state.inner_state),
        )

    return GradientTransformation(init, update)
