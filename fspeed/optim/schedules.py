"""Schedules: pure functions of a count of updates, from an int to a float, from a 0-d tensor to a 0-d tensor.

On tensors they compute in float64 where the count is, and never wait for a device, so a step is traced with its schedule.
Counts begin at 0. Names and defaults are optax's; DeepSpeed's are in `deepspeed_schedules`.
"""
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import requires_grad

Schedule = Callable[[Any], Any]


def schedule(formula: Callable[[Tensor], Any]) -> Schedule:
    """A schedule, from a formula in a float64 tensor.

    >>> reciprocal = schedule(lambda count: 1 / (1 + count))
    >>> reciprocal(3), reciprocal(torch.tensor(3))
    (0.25, tensor(0.2500, dtype=torch.float64))
    """
    @functools.wraps(formula)
    def run(count: Any) -> Any:
        if isinstance(count, Tensor):
            return as_double(formula(count.to(torch.float64)), count)
        value = formula(torch.tensor(count, dtype=torch.float64))
        return value.item() if isinstance(value, Tensor) and not requires_grad(value) else value

    return run


def as_double(x: Any, like: Tensor) -> Tensor:
    """A number in float64, where another tensor is; nothing is copied from the host."""
    return x.to(torch.float64) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=like.device)


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(condition, as_double(x, condition), as_double(y, condition))


# ---------------------------------------------------------------- plain
def constant_schedule(value: Any) -> Schedule:
    """A number that stays.

        value

    >>> constant_schedule(.5)(100)
    0.5
    """
    return schedule(lambda count: value)


def polynomial_schedule(init_value: Any, end_value: Any, power: Any, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From one number to another along a power, and then constant.

        (init_value - end_value) (1 - t / transition_steps)^power + end_value
        t = count - transition_begin, within [0, transition_steps]

    Args:
        init_value, end_value: the first and the last value.
        power: 1 is a straight line.
        transition_steps: how many counts it takes; none or fewer: `init_value` stays.
        transition_begin: the last count with `init_value`.

    >>> polynomial_schedule(1., 0., 2, 10)(5)
    0.25
    """
    if transition_steps <= 0:
        return constant_schedule(init_value)
    begin = max(transition_begin, 0)

    def formula(count: Tensor) -> Any:
        left = 1 - (count - begin).clamp(0, transition_steps) / transition_steps
        return (init_value - end_value) * left**power + end_value

    return schedule(formula)


def linear_schedule(init_value: Any, end_value: Any, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From one number to another along a straight line, and then constant.

        init_value + (end_value - init_value) t / transition_steps,    t = count - transition_begin within [0, transition_steps]

    Args:
        init_value, end_value, transition_steps, transition_begin: as for `polynomial_schedule`.

    >>> linear_schedule(1., 0., 10)(4)
    0.6
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def cosine_decay_schedule(init_value: Any, decay_steps: int, alpha: Any = 0.0, exponent: Any = 1.0) -> Schedule:
    """Down along half a cosine, and then constant.

        init_value ((1 - alpha) ((1 + cos(pi min(count, decay_steps) / decay_steps)) / 2)^exponent + alpha)

    Args:
        init_value: the first value.
        decay_steps: how many counts it takes.
        alpha: the last value over the first.
        exponent: of the cosine.

    Raises:
        ValueError: `decay_steps` is not positive.

    Source: Loshchilov and Hutter, arXiv 1608.03983.

    >>> cosine_decay_schedule(1., 10)(5)
    0.5
    """
    if decay_steps <= 0:
        raise ValueError(f"cosine_decay_schedule: decay_steps must be positive, got {decay_steps}")

    def formula(count: Tensor) -> Any:
        wave = (1 + torch.cos(math.pi * count.clamp(max=decay_steps) / decay_steps)) / 2
        return init_value * ((1 - alpha) * wave**exponent + alpha)

    return schedule(formula)


def exponential_decay(
    init_value: Any, transition_steps: int, decay_rate: float, transition_begin: int = 0, staircase: bool = False,
    end_value: Any = None,
) -> Schedule:
    """A number times a rate for every `transition_steps`.

        init_value decay_rate^(max(count - transition_begin, 0) / transition_steps)

    Args:
        init_value: the first value.
        transition_steps: how many counts a factor of `decay_rate` takes; none or fewer: `init_value` stays.
        decay_rate: the factor; with 0, `init_value` stays.
        transition_begin: the last count with `init_value`.
        staircase: round the exponent down.
        end_value: a bound, from below if it decays, from above if it grows.

    >>> exponential_decay(1., 10, .5)(20)
    0.25
    """
    if transition_steps <= 0 or decay_rate == 0:
        return constant_schedule(init_value)
    begin = max(transition_begin, 0)

    def formula(count: Tensor) -> Any:
        exponent = (count - begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (exponent.floor() if staircase else exponent)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)

    return schedule(formula)


# ---------------------------------------------------------------- of pieces
def piecewise_constant_schedule(init_value: Any, boundaries_and_scales: Mapping[int, float] | None = None) -> Schedule:
    """A number that is scaled at each boundary.

        init_value times the product of the scales whose boundary is at most count

    Args:
        init_value: the first value.
        boundaries_and_scales: {count: factor}.

    Raises:
        ValueError: a scale is negative.

    >>> piecewise_constant_schedule(1., {10: .5, 20: .5})(20)
    0.25
    """
    scales = _sorted_scales("piecewise_constant_schedule", boundaries_and_scales)

    def formula(count: Tensor) -> Any:
        value = init_value
        for boundary, scale in scales:
            value = where(count < boundary, value, value * scale)
        return value

    return schedule(formula)


def piecewise_interpolate_schedule(
    interpolate_type: str, init_value: Any, boundaries_and_scales: Mapping[int, float] | None = None,
) -> Schedule:
    """A number that is scaled by each boundary, and between them interpolated.

        linear: a + (b - a) x;    cosine: b + (a - b) (1 + cos(pi x)) / 2;    from a to b, x of the way

    Args:
        interpolate_type: "linear" or "cosine".
        init_value: the value at 0.
        boundaries_and_scales: {count: factor}, of the value at the boundary before.

    Raises:
        ValueError: no such type, or a scale is negative.

    >>> piecewise_interpolate_schedule("linear", 1., {10: 2., 20: .5})(5)
    1.5
    """
    if interpolate_type not in ("linear", "cosine"):
        raise ValueError(f"piecewise_interpolate_schedule: interpolate_type must be 'linear' or 'cosine', got {interpolate_type!r}")
    scales = _sorted_scales("piecewise_interpolate_schedule", boundaries_and_scales)
    share = (lambda x: x) if interpolate_type == "linear" else (lambda x: (1 - torch.cos(math.pi * x)) / 2)

    def formula(count: Tensor) -> Any:
        value, start, before = init_value, 0, init_value
        for boundary, scale in scales:
            end = before * scale
            along = share((count - start) / max(boundary - start, 1))
            value = where(count < start, value, where(count < boundary, before + (end - before) * along, end))
            start, before = boundary, end
        return value

    return schedule(formula)


def _sorted_scales(who: str, boundaries_and_scales: Mapping[int, float] | None) -> list[tuple[int, float]]:
    scales = sorted((boundaries_and_scales or {}).items())
    if any(scale < 0 for _, scale in scales):
        raise ValueError(f"{who}: scales must not be negative, got {dict(scales)}")
    return scales


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another, each counting from its own beginning.

        schedules[i](count - boundaries[i - 1]),    boundaries[i - 1] <= count < boundaries[i]

    Args:
        schedules: at least one.
        boundaries: at which count each but the first begins.

    >>> join_schedules([constant_schedule(1.), linear_schedule(1., 0., 10)], [10])(14)
    0.6
    """
    def formula(count: Tensor) -> Any:
        value = schedules[0](count)
        for boundary, after in zip(boundaries, schedules[1:], strict=False):
            value = where(count < boundary, value, after(count - boundary))
        return value

    return schedule(formula)


# ---------------------------------------------------------------- with a warm-up
def warmup_constant_schedule(init_value: Any, peak_value: Any, warmup_steps: int) -> Schedule:
    """Up along a straight line, and then constant.

        linear_schedule(init_value, peak_value, warmup_steps)

    >>> warmup_constant_schedule(0., 1., 10)(5)
    0.5
    """
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: Any, peak_value: Any, warmup_steps: int, decay_steps: int, end_value: Any = 0.0, exponent: Any = 1.0,
) -> Schedule:
    """Up along a straight line, and down along half a cosine.

        linear_schedule(init_value, peak_value, warmup_steps), then
        cosine_decay_schedule(peak_value, decay_steps - warmup_steps, end_value / peak_value, exponent)

    Args:
        init_value, peak_value, end_value: the first, the greatest and the last value.
        warmup_steps: how many counts the way up takes.
        decay_steps: how many counts both ways take.
        exponent: of the cosine.

    Raises:
        ValueError: `decay_steps` is not greater than `warmup_steps`.

    Source: Loshchilov and Hutter, arXiv 1608.03983.

    >>> warmup_cosine_decay_schedule(0., 1., 10, 30)(20)
    0.5
    """
    alpha = end_value / peak_value if isinstance(peak_value, Tensor) or peak_value != 0 else 0.0
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), decay], [warmup_steps])


def warmup_exponential_decay_schedule(
    init_value: Any, peak_value: Any, warmup_steps: int, transition_steps: int, decay_rate: float, transition_begin: int = 0,
    staircase: bool = False, end_value: Any = None,
) -> Schedule:
    """Up along a straight line, and down exponentially.

        linear_schedule(init_value, peak_value, warmup_steps), then exponential_decay(peak_value, transition_steps, decay_rate, ...)

    Args:
        init_value, peak_value: the first and the greatest value.
        warmup_steps: how many counts the way up takes.
        transition_steps, decay_rate, transition_begin, staircase, end_value: as for `exponential_decay`.

    >>> warmup_exponential_decay_schedule(0., 1., 10, 10, .5)(20)
    0.5
    """
    decay = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), decay], [warmup_steps])


def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> Schedule:
    """Warm-ups and cosine decays, one after another: gradient descent with warm restarts.

    Args:
        cosine_kwargs: the arguments of `warmup_cosine_decay_schedule` for each.

    Source: Loshchilov and Hutter, arXiv 1608.03983.

    >>> cycle = {"init_value": 0., "peak_value": 1., "warmup_steps": 1, "decay_steps": 11}
    >>> sgdr_schedule([cycle, cycle])(11 + 6)
    0.5
    """
    cycles = list(cosine_kwargs)
    ends = [sum(c["decay_steps"] for c in cycles[: i + 1]) for i in range(len(cycles) - 1)]
    return join_schedules([warmup_cosine_decay_schedule(**c) for c in cycles], ends)


def linear_onecycle_schedule(
    transition_steps: int, peak_value: Any, pct_start: float = 0.3, pct_final: float = 0.85, div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up, back down and further down, along straight lines.

        from peak_value / div_factor to peak_value at pct_start, back at pct_final, and to that over final_div_factor at the end

    Args:
        transition_steps: how many counts all of it takes.
        peak_value: the greatest value.
        pct_start, pct_final: shares of `transition_steps`.
        div_factor, final_div_factor: the greatest over the first value, the first over the last.

    Raises:
        ValueError: `transition_steps` is not positive.

    Source: Smith and Topin, arXiv 1708.07120.

    >>> linear_onecycle_schedule(100, 1.)(30)
    1.0
    """
    _positive("linear_onecycle_schedule", transition_steps)
    return piecewise_interpolate_schedule("linear", peak_value / div_factor, {
        int(pct_start * transition_steps): div_factor,
        int(pct_final * transition_steps): 1 / div_factor,
        transition_steps: 1 / final_div_factor,
    })


def cosine_onecycle_schedule(
    transition_steps: int, peak_value: Any, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4,
) -> Schedule:
    """Up and down along half cosines.

        from peak_value / div_factor to peak_value at pct_start, and to peak_value / (div_factor final_div_factor) at the end

    Args:
        transition_steps: how many counts all of it takes.
        peak_value: the greatest value.
        pct_start: a share of `transition_steps`.
        div_factor, final_div_factor: the greatest over the first value, the first over the last.

    Raises:
        ValueError: `transition_steps` is not positive.

    Source: Smith and Topin, arXiv 1708.07120.

    >>> cosine_onecycle_schedule(100, 1.)(30)
    1.0
    """
    _positive("cosine_onecycle_schedule", transition_steps)
    return piecewise_interpolate_schedule("cosine", peak_value / div_factor, {
        int(pct_start * transition_steps): div_factor,
        int(transition_steps): 1 / (div_factor * final_div_factor),
    })


def _positive(who: str, transition_steps: int) -> None:
    if transition_steps <= 0:
        raise ValueError(f"{who}: transition_steps must be positive, got {transition_steps}")
