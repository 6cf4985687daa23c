"""Clips: bounds on what an update may be."""
from typing import Any

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, stateless, stateless_with_tree_map
from fspeed.optim.norms import global_norm
from fspeed.shard.pytree import tree_map


def clip(max_delta: float) -> GradientTransformation:
    """Bound each element.

        min(max(u, -max_delta), max_delta)

    Args:
        max_delta: a number.

    >>> import torch
    >>> clip(1.).update(torch.tensor([-3., .5]), ())[0]
    tensor([-1.0000,  0.5000])
    """
    return stateless_with_tree_map(lambda u, p: u.clamp(-max_delta, max_delta))


def clip_by_global_norm(max_norm: Number) -> GradientTransformation:
    """Scale updates down to a global norm, where it is greater.

        u min(1, max_norm / norm(u))

    Zeros stay zeros, `max_norm` 0 gives zeros, and so does an infinite norm (optax leaves NaN where an element is infinite).
    A norm that is NaN gives NaN.

    Args:
        max_norm: the greatest norm, over all ranks.

    Cost: `global_norm`'s, and one pass over the updates.

    Source: Pascanu et al., arXiv 1211.5063.

    >>> import torch
    >>> clip_by_global_norm(1.).update({"b": torch.tensor(3.), "w": torch.tensor([4.])}, ())[0]
    {'b': tensor(0.6000), 'w': tensor([0.8000])}
    """
    def run(updates: Any, params: Any) -> Any:
        norm = global_norm(updates)
        by = torch.where(norm <= max_norm, 1, max_norm / torch.where(norm == 0, 1, norm))
        return tree_map(lambda u: _scaled(u, by, norm), updates)

    return stateless(run)


def _scaled(u: Tensor, by: Tensor, norm: Tensor) -> Tensor:
    return torch.where(norm.isinf(), 0, u * by).to(u.dtype)
