"""Adding updates to parameters."""
from typing import Any

import torch

from fspeed.shard.pytree import tree_map


def apply_updates(params: Any, updates: Any) -> Any:
    """Parameters plus updates, each in its parameter's dtype.

        params + updates

    Args:
        params: a pytree of tensors.
        updates: a pytree of the same structure.

    >>> import torch
    >>> apply_updates({"w": torch.tensor(1.)}, {"w": torch.tensor(-.25)})
    {'w': tensor(0.7500)}
    """
    return tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


def incremental_update(new_tensors: Any, old_tensors: Any, step_size: Any) -> Any:
    """The exponential moving average of tensors, one step of it.

        step_size new + (1 - step_size) old

    Args:
        new_tensors, old_tensors: pytrees of the same structure.
        step_size: between 0 and 1.

    Source: Polyak and Juditsky, 1992.

    >>> incremental_update({"w": 1.}, {"w": 0.}, .25)
    {'w': 0.25}
    """
    return tree_map(lambda new, old: step_size * new + (1 - step_size) * old, new_tensors, old_tensors)


def periodic_update(new_tensors: Any, old_tensors: Any, steps: Any, update_period: int) -> Any:
    """The new tensors at every `update_period`-th step, the old ones at the others.

    Args:
        new_tensors, old_tensors: pytrees of the same structure.
        steps: the count of steps, an int or a 0-d tensor.
        update_period: how many steps lie between two updates.

    >>> import torch
    >>> periodic_update(torch.tensor(1.), torch.tensor(0.), torch.tensor(4), 2)
    tensor(1.)
    """
    now = torch.as_tensor(steps) % update_period == 0
    return tree_map(lambda new, old: torch.where(now, new, old), new_tensors, old_tensors)
