"""Weight decay: updates that pull parameters to zero."""
from typing import Any, NamedTuple

from torch import Tensor

from fspeed.optim.base import EmptyState, GradientTransformation, NumberOrSchedule, increment, new_count, require_params, value_at
from fspeed.optim.leaves import as_function, by_leaf, spread
from fspeed.optim.masking import Mask, MaskedState
from fspeed.shard.pytree import tree_map


class WeightDecaySchedule(NamedTuple):
    """How many updates a schedule of weight decays has seen: int32."""
    count: Tensor       # type: ignore[assignment]


def add_decayed_weights(weight_decay: NumberOrSchedule = 0.0, mask: Mask | None = None) -> GradientTransformation:
    """Add parameters times a number to updates.

        u + weight_decay p

    Args:
        weight_decay: a number or a schedule.
        mask: which leaves decay: a tree of bools of the parameters' structure or of a prefix of it, or a function that makes it
            from them, such as `lambda params: tree_map(lambda p: p.dim() > 1, params)`; it is given the plain tree on any
            placement, as meta tensors where parameters are stored in groups. The others keep their bits at zero gradients.

    Returns:
        A transformation, whose state is optax's: `MaskedState` of it if there is a mask.

    >>> import torch
    >>> opt = add_decayed_weights(.5, mask={"b": False, "w": True})
    >>> params = {"b": torch.tensor(2.), "w": torch.tensor(2.)}
    >>> opt.update({"b": torch.tensor(1.), "w": torch.tensor(1.)}, opt.init(params), params)[0]
    {'b': tensor(1.), 'w': tensor(2.)}
    """
    decays = as_function(mask)

    def init(params: Any) -> Any:
        state = WeightDecaySchedule(new_count(params)) if callable(weight_decay) else EmptyState()
        return state if mask is None else MaskedState(state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        require_params(params, "add_decayed_weights")
        by, new = decay_now(weight_decay, state)
        if isinstance(by, (int, float)) and by == 0:
            return updates, new
        decayed = lambda u, p: (u + by * p).to(u.dtype)
        if mask is None:
            return tree_map(decayed, updates, params), new
        return by_leaf(lambda yes, u, p: decayed(u, p) if yes else u, spread(decays, updates), updates, params), new

    return GradientTransformation(init, update)


def decay_now(weight_decay: NumberOrSchedule, state: Any) -> tuple[Any, Any]:
    """The weight decay at a state, and the next state."""
    if isinstance(state, MaskedState):
        by, new = decay_now(weight_decay, state.inner_state)
        return by, MaskedState(new)
    if isinstance(state, WeightDecaySchedule):
        return value_at(weight_decay, state.count), WeightDecaySchedule(increment(state.count))
    return weight_decay, state
