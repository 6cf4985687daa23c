"""Exponential moving averages, in at least float32 whatever they are kept in."""
from typing import Any

import torch
from torch import Tensor

from fspeed.optim.base import increment
from fspeed.shard.piece import at_least_float32
from fspeed.shard.pytree import tree_map


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(at_least_float32(x.dtype))


def zeros(params: Any, dtype: torch.dtype | None = None) -> Any:
    """A tree of zeros like params."""
    return tree_map(lambda p: torch.zeros_like(p, dtype=dtype), params)


def full(params: Any, value: Any) -> Any:
    """A tree of a number like params; flat buffers are padded with it too, which nothing reads."""
    return tree_map(lambda p: torch.full_like(p, value), params)


def cast_like(tree: Any, like: Any) -> Any:
    """A tree in the dtypes of another: a state keeps the dtypes it began with."""
    return tree_map(lambda x, y: x.to(y.dtype), tree, like)


def kept(state: Any, **new: Any) -> Any:
    """A state with new moments, by name, in the dtypes that it began with."""
    return state._replace(**{name: cast_like(x, getattr(state, name)) for name, x in new.items()})


def update_moment(updates: Any, moments: Any, decay: Any) -> Any:
    """(1 - decay) g + decay m."""
    return tree_map(lambda g, m: (1 - decay) * wide(g) + decay * wide(m), updates, moments)


def update_second_moment(updates: Any, moments: Any, decay: Any) -> Any:
    """(1 - decay) |g|^2 + decay v."""
    return tree_map(lambda g, v: (1 - decay) * abs_sq(wide(g)) + decay * wide(v), updates, moments)


def abs_sq(x: Tensor) -> Tensor:
    return x.abs().square() if x.is_complex() else x.square()


def correction(decay: Any, count: Tensor) -> Tensor:
    """1 - decay^count, in float64: in float32 it is off by 5e-5 for a decay of 0.999 and a count of 1."""
    return 1 - decay ** count.to(torch.float64)


def bias_correction(moments: Any, decay: Any, count: Tensor) -> Any:
    """m / (1 - decay^count): the average as if it had not begun at zero."""
    by = correction(decay, count)
    return tree_map(lambda m: (m / by).to(m.dtype), moments)


def debiased_mean(updates: Any, mu: Any, decay: Any, count: Tensor, nesterov: bool = False) -> Any:
    """mu / (1 - decay^count); with Nesterov's look ahead decay mu / (1 - decay^(count + 1)) + (1 - decay) g / (1 - decay^count)."""
    if not nesterov:
        return bias_correction(mu, decay, count)
    ahead, now = bias_correction(mu, decay, increment(count)), bias_correction(tree_map(wide, updates), decay, count)
    return tree_map(lambda m, g: decay * m + (1 - decay) * g, ahead, now)


def over_root(updates: Any, mu: Any, nu: Any, eps: Any, eps_root: Any = 0.0) -> Any:
    """mu / (sqrt(nu + eps_root) + eps), in the updates' dtypes."""
    return tree_map(lambda u, m, v: (m / ((v + eps_root).sqrt() + eps)).to(u.dtype), updates, mu, nu)
