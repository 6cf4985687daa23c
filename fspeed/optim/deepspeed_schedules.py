"""DeepSpeed's schedules, as functions of what its schedulers call `last_batch_iteration`."""
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspeed.optim.schedules import Schedule, schedule, where


def lr_range_test(min_lr: Any = 1e-3, step_size: int = 2000, step_rate: float = 1.0, staircase: bool = False) -> Schedule:
    """Up without end, to find the greatest learning rate that still trains.

        min_lr (1 + step_rate (count + 1) / step_size)

    Args:
        min_lr: the value at -1.
        step_size: how many counts a growth by `step_rate` takes.
        step_rate: in multiples of `min_lr`.
        staircase: round (count + 1) / step_size down.

    Source: Smith, arXiv 1803.09820.

    >>> lr_range_test(1e-3, 10)(9)
    0.002
    """
    def formula(count: Tensor) -> Any:
        steps = (count + 1) / step_size
        return min_lr * (1 + step_rate * (steps.floor() if staircase else steps))

    return schedule(formula)


def one_cycle(
    min_lr: Any, max_lr: Any, first_steps: int = 2000, second_steps: int | None = None,
    decay_rate: float = 0.0, decay_steps: int = 0,
) -> Schedule:
    """A learning rate that goes up and down once, and then decays; its momentum is `one_cycle_momentum`.

        min_lr + (max_lr - min_lr) f,    f from 0 to 1 by count + 1 = first_steps, and to 0 by first_steps + second_steps = T
        from count = T: min_lr / (1 + decay_rate d),    d = (count - T + 1) / decay_steps

    Args:
        min_lr, max_lr: the least and the greatest value.
        first_steps, second_steps: how many counts up and down take; down, by default as many as up.
        decay_rate, decay_steps: of the decay; with `decay_steps=0`, `min_lr` stays.

    Source: Smith, arXiv 1803.09820.

    >>> one_cycle(0., 1., 10, 20)(9)
    1.0
    """
    up_and_down, after = _cycle(first_steps, second_steps, decay_rate, decay_steps)
    return schedule(lambda count: (min_lr + (max_lr - min_lr) * up_and_down(count)) / after(count))


def one_cycle_momentum(
    min_momentum: Any = 0.8, max_momentum: Any = 0.9, first_steps: int = 2000, second_steps: int | None = None,
    decay_rate: float = 0.0, decay_steps: int = 0,
) -> Schedule:
    """The momentum that goes down and up while `one_cycle` goes up and down.

        max_momentum - (max_momentum - min_momentum) f;    from count = T: max_momentum (1 + decay_rate d);    f, T, d as there

    Args:
        min_momentum, max_momentum: the least and the greatest value.
        first_steps, second_steps, decay_rate, decay_steps: as for `one_cycle`.

    Source: Smith, arXiv 1803.09820.

    >>> one_cycle_momentum(.5, 1., 10, 20)(9)
    0.5
    """
    down_and_up, after = _cycle(first_steps, second_steps, decay_rate, decay_steps)
    return schedule(lambda count: (max_momentum - (max_momentum - min_momentum) * down_and_up(count)) * after(count))


def _cycle(first: int, second: int | None, rate: float, decay_steps: int) -> tuple[Callable, Callable]:
    """The share of the way up, 0 after the cycle; and 1 + rate d, 1 during it."""
    total = first + (first if second is None else second)
    peak = first / total

    def share(count: Tensor) -> Tensor:
        x = (count + 1) / total
        return torch.where(x <= peak, x / peak, (x - 1) / (peak - 1)).clamp(min=0)

    def growth(count: Tensor) -> Any:
        return 1 + rate * (count - total + 1) / decay_steps * (count >= total) if decay_steps else 1.0

    return share, growth


def warmup_log(init_value: Any, peak_value: Any, warmup_steps: int) -> Schedule:
    """Up along a logarithm, and then constant.

        init_value + (peak_value - init_value) min(1, log(count + 1) / log(warmup_steps))

    Args:
        init_value, peak_value: the first and the greatest value.
        warmup_steps: how many counts it takes, at least 2.

    >>> round(warmup_log(0., 1., 10)(4), 4)
    0.699
    """
    steps = max(warmup_steps, 2)
    return _between(init_value, peak_value, lambda count: (torch.log(count + 1) / math.log(steps)).clamp(max=1))


def warmup_linear(init_value: Any, peak_value: Any, warmup_steps: int) -> Schedule:
    """Up along a straight line, and then constant.

        init_value + (peak_value - init_value) min(1, count / warmup_steps)

    Args:
        init_value, peak_value: the first and the greatest value.
        warmup_steps: how many counts it takes, at least 2.

    >>> warmup_linear(0., 1., 10)(4)
    0.4
    """
    steps = max(warmup_steps, 2)
    return _between(init_value, peak_value, lambda count: (count / steps).clamp(max=1))


def warmup_decay(init_value: Any, peak_value: Any, warmup_steps: int, total_steps: int, warmup: Callable = warmup_log) -> Schedule:
    """Up as a warm-up, and down along a straight line.

        init_value + (peak_value - init_value) f
        f as in the warm-up, and from count = warmup_steps max(0, (T - count) / (T - warmup_steps))

    Args:
        init_value, peak_value: the first and last, and the greatest value.
        warmup_steps: how many counts the way up takes, at least 2.
        total_steps: T, how many counts both ways take.
        warmup: `warmup_log` or `warmup_linear`.

    >>> warmup_decay(0., 1., 10, 30)(15)
    0.75
    """
    steps = max(warmup_steps, 2)
    up = warmup(0.0, 1.0, steps)
    down = lambda count: ((total_steps - count) / max(total_steps - steps, 1)).clamp(min=0)
    return _between(init_value, peak_value, lambda count: where(count < steps, up(count), down(count)))


def warmup_cosine(
    peak_value: Any, warmup_steps: int, total_steps: int, warmup_min_ratio: float = 0.0, cos_min_ratio: float = 1e-4,
    warmup: Callable = warmup_log,
) -> Schedule:
    """Up as a warm-up, and down along half a cosine to a floor.

        peak_value (cos_min_ratio + (1 - cos_min_ratio) (1 + cos(pi min(1, (count - N + 1) / (T - N)))) / 2),    from count = N

    Args:
        peak_value: the greatest value.
        warmup_steps: N, how many counts the way up takes, at least 2.
        total_steps: T, how many counts both ways take.
        warmup_min_ratio, cos_min_ratio: the first and the last value over the greatest.
        warmup: `warmup_log` or `warmup_linear`.

    >>> warmup_cosine(1., 10, 30)(29)
    0.0001
    """
    steps = max(warmup_steps, 2)
    up = warmup(warmup_min_ratio, 1.0, steps)

    def formula(count: Tensor) -> Any:
        along = ((count - steps + 1) / max(total_steps - steps, 1)).clamp(max=1)
        down = cos_min_ratio + (1 - cos_min_ratio) * (1 + torch.cos(math.pi * along)) / 2
        return peak_value * where(count < steps, up(count), down)

    return schedule(formula)


def _between(init_value: Any, peak_value: Any, share: Callable[[Tensor], Any]) -> Schedule:
    return schedule(lambda count: init_value + (peak_value - init_value) * share(count))
