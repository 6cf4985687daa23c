"""Clips: bounds on what an update may be."""
from typing import Any

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, require_params, stateless, stateless_with_tree_map
from fspeed.optim.fused import number
from fspeed.optim.leaves import by_leaf, every
from fspeed.optim.moments import abs_sq
from fspeed.optim.norms import global_norm, leaf_rms, safe_sqrt
from fspeed.optim.scale import times
from fspeed.optim.wholes import on_whole
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

    Cost: `global_norm`'s, and one pass over the updates; none on the CPU where nothing is clipped.

    Source: Pascanu et al., arXiv 1211.5063.

    >>> import torch
    >>> clip_by_global_norm(1.).update({"b": torch.tensor(3.), "w": torch.tensor([4.])}, ())[0]
    {'b': tensor(0.6000), 'w': tensor([0.8000])}
    """
    def run(updates: Any, params: Any) -> Any:
        norm = global_norm(updates)
        if number(norm) is not norm and number(norm) <= max_norm:
            return updates
        by = torch.where(norm <= max_norm, 1, max_norm / torch.where(norm == 0, 1, norm))
        return tree_map(lambda u: torch.where(norm.isinf(), 0, u * by).to(u.dtype), updates)

    return stateless(run)


def clip_by_block_rms(threshold: Number) -> GradientTransformation:
    """Scale each leaf's update down to a root mean square, where it is greater.

        u / max(1, rms(u) / threshold)

    Args:
        threshold: the greatest root mean square of a whole leaf.

    Cost: two passes over the updates, and one number a leaf summed over each mesh axis.

    Source: Shazeer and Stern, arXiv 1804.04235.

    >>> clip_by_block_rms(1.).update(torch.tensor([2., -2.]), ())[0]
    tensor([ 1., -1.])
    """
    def run(updates: Any, params: Any) -> Any:
        by = 1 / (leaf_rms(updates).squeeze(0) / threshold).clamp(min=1)
        return by_leaf(times, list(by.unbind()), updates)

    return stateless(run)


def adaptive_grad_clip(clipping: Number, eps: Number = 1e-3, axis: Any = None) -> GradientTransformation:
    """Scale each unit's gradient down, where its norm is greater than a share of its parameters' norm.

        g min(1, clipping max(norm(p), eps) / norm(g)),    norms over what leads into one output unit

    Args:
        clipping: the greatest norm of a gradient over that of its parameters.
        eps: the least norm of parameters that counts.
        axis: the dims that norms are taken over; by default all of a vector, the first of 2 or 3, all but the last of 4 or 5.

    Raises:
        ValueError: a leaf has more than 5 dims, and no axis is given.

    Cost: flat shards of updates and parameters are gathered, a group at a time.

    Source: Brock et al., arXiv 2102.06171.

    >>> adaptive_grad_clip(.5).update(torch.tensor([3., 4.]), (), torch.tensor([.6, .8]))[0]
    tensor([0.3000, 0.4000])
    """
    def run(updates: Any, params: Any) -> Any:
        require_params(params, "adaptive_grad_clip")
        most, = on_whole(lambda _, p: (clipping * _unit_norm(p, axis).clamp(min=eps),), every(params), params)
        norms, = on_whole(lambda _, g: (_unit_norm(g, axis),), every(updates), updates)
        return tree_map(lambda u, n, m: torch.where(n < m, u, u * (m / n.clamp(min=1e-6))).to(u.dtype), updates, norms, most)

    return stateless(run)


def _unit_norm(x: Tensor, axis: Any) -> Tensor:
    """The norm of each unit, at each of its elements."""
    if axis is None:
        if x.dim() > 5:
            raise ValueError(f"adaptive_grad_clip: give axis= for a leaf of shape {tuple(x.shape)}; it knows up to 5 dims")
        vector = sum(n != 1 for n in x.shape) <= 1
        axis = tuple(range(x.dim())) if vector else 0 if x.dim() in (2, 3) else tuple(range(x.dim() - 1))
    return safe_sqrt(abs_sq(x).sum(axis, keepdim=True)).expand_as(x)
