"""Microbatches: any number of them, in fp32, is the whole batch."""
import pytest
import torch

import fspeed as fs
from fspeed import optim, random
from fspeed.step import Batch
from fspeed.testing import assert_close, problem
from fspeed.transforms.accumulate import split

T = torch.tensor


@pytest.mark.parametrize("rows, n, sizes", [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (4, 1, [4])])
def test_parts_are_consecutive_and_as_even_as_may_be(rows, n, sizes):
    parts = split(Batch({"x": torch.arange(rows)}, torch.arange(rows) + 5), n)
    assert [len(p.rows) for p in parts] == sizes
    assert torch.equal(torch.cat([p.rows for p in parts]), torch.arange(rows) + 5)
    assert torch.equal(torch.cat([p.data["x"] for p in parts]), torch.arange(rows))


def two_steps(n, again=None):
    p = problem()
    step = fs.accumulate(fs.step(p.loss, optim.sgd(0.5), layers=p.layers, trainable=p.trainable), n)
    step = step if again is None else fs.accumulate(step, again)
    state = step.init(p.params, random.key(1))
    state, _ = step(state, p.batch(0, 5))
    state, metrics = step(state, p.batch(1, 5))
    return step.params(state), metrics


@pytest.mark.parametrize("n, again", [(2, None), (5, None), (9, None), (2, 3)])
def test_any_number_of_microbatches_is_one(n, again):
    assert_close(two_steps(n, again), two_steps(1), 2e-6, f"{n} microbatches")       # sums in another order


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", None])
def test_what_is_no_number_of_microbatches_is_refused(n):
    with pytest.raises(ValueError, match="positive integer"):
        fs.accumulate(fs.step(lambda p, b, key: fs.mean(p), optim.sgd(1.0)), n)


def test_sums_of_short_floats_are_float32():
    """Case 9: parameters in bf16, gradients 256 and 1: their sum is 257."""
    step = fs.accumulate(fs.step(lambda p, b, key: fs.Loss((p["w"] * b).sum().float(), 1), optim.sgd(1.0)), 2)
    _, grads = step.value_and_grad(step.init({"w": T(0.0, dtype=torch.bfloat16)}), T([256.0, 1.0], dtype=torch.bfloat16))
    assert grads["root"]["w"].dtype == torch.float32 and grads["root"]["w"] == 257 / 2


def test_microbatches_with_metrics_of_their_own_are_refused():
    loss = lambda p, b, key: (fs.mean(p["w"] * b), {"big": fs.mean(b)} if b.sum() > 2 else {})
    step = fs.accumulate(fs.step(loss, optim.sgd(1.0)), 2)
    with pytest.raises(ValueError, match="big"):
        step(step.init({"w": T(0.0)}), T([1.0, 3.0]))
