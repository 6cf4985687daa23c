"""DeepSpeed's schedules, by its values."""
import math

import pytest
import torch

from fspeed import optim


def values(schedule, counts):
    assert [schedule(torch.tensor(i)).item() for i in counts] == [schedule(i) for i in counts]
    return pytest.approx([schedule(i) for i in counts], abs=5e-5)


def test_lr_range_test():
    assert values(optim.lr_range_test(1e-3, 10), [-1, 0, 8, 9, 19]) == [0.001, 0.0011, 0.0019, 0.002, 0.003]
    assert optim.lr_range_test(1e-3, 10)(0) == pytest.approx(0.0011, rel=1e-12)
    assert values(optim.lr_range_test(1.0, 10, 2.0, staircase=True), [-1, 0, 8, 9, 18, 19]) == [1, 1, 1, 3, 3, 5]


def test_one_cycle_and_its_momentum():
    counts = [-1, 4, 9, 14, 19, 29, 30, 39, 49]
    rate = optim.one_cycle(1.0, 3.0, 10, 20, decay_rate=0.5, decay_steps=10)
    assert values(rate, counts) == [1, 2, 3, 2.5, 2, 1, 1 / 1.05, 1 / 1.5, 1 / 2]
    momentum = optim.one_cycle_momentum(0.8, 0.9, 10, 20, decay_rate=0.5, decay_steps=10)
    assert values(momentum, counts) == [0.9, 0.85, 0.8, 0.825, 0.85, 0.9, 0.945, 1.35, 1.8]
    assert values(optim.one_cycle(1.0, 3.0, 10), [9, 19, 20, 1000]) == [3, 1, 1, 1]


def test_warmups():
    assert values(optim.warmup_log(0.0, 1.0, 10), [0, 1, 4, 8, 9, 50]) == [0, 0.3010, 0.6990, 0.9542, 1, 1]
    assert values(optim.warmup_linear(0.0, 1.0, 10), [0, 1, 4, 9, 10, 50]) == [0, 0.1, 0.4, 0.9, 1, 1]
    assert values(optim.warmup_linear(1.0, 3.0, 10), [0, 5, 10]) == [1, 2, 3]
    assert values(optim.warmup_log(0.0, 1.0, 0), [0, 1, 2]) == [0, 1, 1]


def test_warmup_decay():
    log, linear = optim.warmup_decay(0.0, 1.0, 10, 30), optim.warmup_decay(0.0, 1.0, 10, 30, optim.warmup_linear)
    assert values(log, [0, 4, 10, 15, 20, 30, 99]) == [0, 0.6990, 1, 0.75, 0.5, 0, 0]
    assert values(linear, [0, 4, 10, 15]) == [0, 0.4, 1, 0.75]


def test_warmup_cosine():
    schedule = optim.warmup_cosine(2.0, 10, 30, warmup=optim.warmup_linear)
    assert values(schedule, [0, 5, 19, 29, 30, 1000]) == [0, 1, 1.0001, 0.0002, 0.0002, 0.0002]
    half = lambda i: 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * (i - 9) / 20)) / 2
    assert values(optim.warmup_cosine(1.0, 10, 30), [10, 13, 25]) == [half(10), half(13), half(25)]
    assert values(optim.warmup_cosine(1.0, 10, 30, warmup_min_ratio=0.5, warmup=optim.warmup_linear), [0, 5]) == [0.5, 0.75]


@pytest.mark.parametrize("make, message", [
    (lambda: optim.cosine_decay_schedule(1.0, 0), "decay_steps must be positive, got 0"),
    (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10), "decay_steps must be positive, got 0"),
    (lambda: optim.piecewise_constant_schedule(1.0, {1: -1.0}), "scales must not be negative"),
    (lambda: optim.piecewise_interpolate_schedule("cubic", 1.0), "must be 'linear' or 'cosine', got 'cubic'"),
    (lambda: optim.linear_onecycle_schedule(0, 1.0), "transition_steps must be positive, got 0"),
])
def test_what_is_no_schedule_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()
