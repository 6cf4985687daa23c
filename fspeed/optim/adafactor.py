"""Adafactor: second moments of matrices kept as row and column means."""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count
from fspeed.optim.clipping import clip_by_block_rms
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.ema import ema
from fspeed.optim.leaves import every
from fspeed.optim.masking import Mask
from fspeed.optim.moments import abs_sq, wide
from fspeed.optim.ratio import scale_by_param_block_rms
from fspeed.optim.scale import scale, scale_by_learning_rate
from fspeed.optim.wholes import on_whole, outline
from fspeed.shard.pytree import tree_map


class FactoredState(NamedTuple):
    """The number of updates (int32), and of each whole leaf the row and column means of its squares, or else its mean squares.

    What a leaf does not have is zeros of shape (1,). On any placement these are trees of whole leaves, the same on every rank.
    """
    count: Tensor       # type: ignore[assignment]
    v_row: Any
    v_col: Any
    v: Any


def power_decay(count: Any, exponent: Any) -> Any:
    """1 - (count + 1)^-exponent."""
    return 1 - (count + 1) ** -exponent


def scale_by_factored_rms(
    factored: bool = True, decay_rate: Number = 0.8, step_offset: int = 0, min_dim_size_to_factor: int = 128,
    epsilon: Number = 1e-30, decay_rate_fn: Callable[[Any, Any], Any] = power_decay,
) -> GradientTransformation:
    """Divide by the root of a mean of squared gradients that is kept by rows and columns.

        v_row = d v_row + (1 - d) row means of |g|^2 + epsilon;    v_col likewise;    d = 1 - (t + 1)^-decay_rate, t from 0
        u = g / sqrt(v_row v_col / mean(v_row))

    Leaves with fewer than two dims of at least `min_dim_size_to_factor` keep a full mean v.

    Args:
        factored: False keeps a full mean for all.
        decay_rate: how fast the means come to forget slowly.
        step_offset: subtracted from the count, for fine-tuning.
        min_dim_size_to_factor: the least size of both of a leaf's two largest dims.
        epsilon: added to squared gradients.
        decay_rate_fn: d, from (count - step_offset, decay_rate).

    Cost: a matrix of n by m keeps n + m numbers, on every rank; other leaves keep all of theirs, on every rank. Gradients in flat
        shards are gathered, a group at a time: (N-1)/N of their bytes sent by each rank.

    Source: Shazeer and Stern, arXiv 1804.04235.

    >>> opt = scale_by_factored_rms(min_dim_size_to_factor=2)
    >>> state = opt.init(torch.zeros(3, 2))
    >>> state.v_row.shape, state.v_col.shape, state.v.shape
    (torch.Size([2]), torch.Size([3]), torch.Size([1]))
    >>> opt.update(torch.ones(3, 2), state)[0][0]
    tensor([1., 1.])
    """
    dims = partial(_two_largest, factored=factored, least=min_dim_size_to_factor)

    def init(params: Any) -> FactoredState:
        count, whole = new_count(params), outline(params)
        zeros = lambda shape: tree_map(lambda p: torch.zeros(shape(tuple(p.shape)), dtype=p.dtype, device=count.device), whole)
        return FactoredState(count, zeros(lambda s: _means(s, dims(s), 1)), zeros(lambda s: _means(s, dims(s), 0)), zeros(
            lambda s: (1,) if dims(s) else s
        ))

    def update(updates: Any, state: FactoredState, params: Any = None) -> tuple[Any, FactoredState]:
        decay = decay_rate_fn(state.count.to(torch.float64) - step_offset, decay_rate)
        mean = lambda old, new: (decay * wide(old) + (1 - decay) * new).to(old.dtype)

        def one(_: None, g: Tensor, v_row: Tensor, v_col: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            squares = abs_sq(wide(g)) + epsilon
            two = dims(g.shape)
            if two is None:
                v = mean(v, squares)
                return (g * wide(v).rsqrt()).to(g.dtype), v_row, v_col, v
            second, first = two
            v_row, v_col = mean(v_row, squares.mean(first)), mean(v_col, squares.mean(second))
            rows, columns = wide(v_row).unsqueeze(first), wide(v_col).unsqueeze(second)
            return (g * (rows / rows.mean(second, keepdim=True)).rsqrt() * columns.rsqrt()).to(g.dtype), v_row, v_col, v

        out, *kept = on_whole(one, every(updates), updates, state.v_row, state.v_col, state.v)
        return out, FactoredState(increment(state.count), *kept)

    return GradientTransformation(init, update)


def _two_largest(shape: tuple[int, ...], factored: bool, least: int) -> tuple[int, int] | None:
    """The dims of the second largest and the largest size, if a leaf of that shape is factored."""
    order = sorted(range(len(shape)), key=lambda i: shape[i])
    return (order[-2], order[-1]) if factored and len(shape) >= 2 and shape[order[-2]] >= least else None


def _means(shape: tuple[int, ...], dims: tuple[int, int] | None, which: int) -> tuple[int, ...]:
    """The shape of the means over one of the two dims."""
    return shape[: dims[which]] + shape[dims[which] + 1 :] if dims else (1,)


def adafactor(
    learning_rate: NumberOrSchedule | None = None, min_dim_size_to_factor: int = 128, decay_rate: Number = 0.8,
    decay_offset: int = 0, multiply_by_parameter_scale: bool = True, clipping_threshold: Number | None = 1.0,
    momentum: Number | None = None, dtype_momentum: torch.dtype = torch.float32, weight_decay_rate: NumberOrSchedule | None = None,
    eps: Number = 1e-30, factored: bool = True, weight_decay_mask: Mask | None = None,
) -> GradientTransformation:
    """Adafactor.

        p - learning_rate max(rms(p), 1e-3) u / max(1, rms(u) / clipping_threshold),    u as in `scale_by_factored_rms`

    Args:
        learning_rate: a number or a schedule; None is 1.
        min_dim_size_to_factor, decay_rate, factored: as for `scale_by_factored_rms`, with `decay_offset` as its `step_offset` and
            `eps` as its `epsilon`.
        multiply_by_parameter_scale: whether steps are in proportion to each leaf.
        clipping_threshold: the greatest root mean square of a leaf's u; None is no bound.
        momentum, dtype_momentum: the decay of a moving average of the updates, and what it is kept in; None is none.
        weight_decay_rate, weight_decay_mask: as for `add_decayed_weights`; not multiplied by the learning rate.

    Cost: as for `scale_by_factored_rms`; with momentum one number more for each parameter; and two numbers a leaf summed over each
        mesh axis.

    Source: Shazeer and Stern, arXiv 1804.04235.

    >>> opt = adafactor(.1)
    >>> params = torch.tensor([1., 1.])
    >>> opt.update(torch.tensor([2., -.1]), opt.init(params), params)[0]
    tensor([-0.1000,  0.1000])
    """
    links = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        links.append(clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        links.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        links.append(scale_by_param_block_rms())
    if momentum is not None:
        links.append(ema(momentum, debias=False, accumulator_dtype=dtype_momentum))
    if weight_decay_rate is not None:
        links.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*links, scale(-1))
