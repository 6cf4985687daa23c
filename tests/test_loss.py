"""Losses and metrics are weighted sums: right for every split, never NaN, and refused where they would be ambiguous."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fspeed as fs
from fspeed import optim
from fspeed.loss import Loss, as_metrics, mean

T = torch.tensor
floats = st.floats(-8, 8, width=16)


@given(st.lists(st.tuples(floats, st.booleans()), max_size=12), st.integers(0, 12))
def test_a_mean_of_parts_is_the_mean(values, at):
    x, mask = T([v for v, _ in values]), T([m for _, m in values], dtype=torch.bool)
    whole, a, b = mean(x, mask), mean(x[:at], mask[:at]), mean(x[at:], mask[at:])
    torch.testing.assert_close(Loss(a.total + b.total, a.weight + b.weight).value(), whole.value())
    if mask.any():
        torch.testing.assert_close(whole.value(), x[mask].mean())
    else:
        assert whole.value() == 0


def test_values_under_a_zero_are_not_looked_at():
    x = T([1.0, float("nan"), float("inf"), 3.0], requires_grad=True)
    loss = mean(x, T([1, 0, 0, 1]))
    assert loss.value() == 2
    assert torch.autograd.grad(loss.total, x)[0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("dtype, expected", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64),
    (torch.int64, torch.float32),
])
def test_sums_are_at_least_float32(dtype, expected):
    loss = mean(torch.tensor([256, 1]).to(dtype))
    assert loss.total.dtype == loss.weight.dtype == expected and loss.total == 257


def test_weights_may_be_any_numbers():
    assert mean(T([1.0, 3.0]), T([0.5, 1.5])).value() == 2.5
    assert Loss(T(6.0), 3).value() == 2 and Loss(T(6.0), 0).value() == 0


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\), the mask \(2,\)"):
        mean(torch.ones(2, 3), torch.ones(2))


w = torch.ones(3)
REFUSED = {
    "a float": (1.0, "'loss' must be an fs.Loss or a 0-d tensor, got a float"),
    "nothing": (None, "got a NoneType"),
    "a vector": (w, r"got a tensor of shape \(3,\)"),
    "a list": ([mean(w)], "got a list"),
    "a Loss of vectors": (Loss(w, T(3.0)), r"a tensor of shape \(3,\), a tensor of shape \(\); both .* 0-d"),
    "a weight of vectors": (Loss(w.sum(), w), "0-d"),
    "a weight of text": (Loss(w.sum(), "3"), "a str"),
    "an integer": (Loss(T(3), 1), "dtype torch.int64"),
    "a complex number": (Loss(T(3j), 1), "dtype torch.complex64"),
    "a tuple of three": ((mean(w), mean(w), mean(w)), "a tuple of 3"),
    "a list of metrics": ((mean(w), [mean(w)]), "a tuple of 2"),
    "a metric that is a number": ((mean(w), {"a": 1.0}), "'a' must be"),
    "a metric that is a vector": ((mean(w), {"a": w}), "'a' must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name):
    out, says = REFUSED[name]
    step = fs.step(lambda params, batch, key: out, optim.sgd(1.0))
    with pytest.raises(TypeError, match=says):
        step(step.init({"w": T(0.0)}), w)


@pytest.mark.parametrize("name", ["loss", "buffers"])
def test_a_metric_cannot_take_the_steps_own_names(name):
    with pytest.raises(ValueError, match=f"a metric named '{name}'"):
        as_metrics((mean(w), {name: mean(w)}), torch.arange(3))


def test_a_scalar_is_a_mean_over_rows_and_nothing_over_none():
    assert as_metrics(T(2.0), torch.arange(3))["loss"] == (6, 3)
    assert as_metrics(T(float("nan")), torch.arange(0))["loss"] == (0, 0)


def test_buffers_must_keep_their_structure():
    with pytest.raises(TypeError, match="buffers of the same structure"):
        as_metrics((mean(w), {}, {"b": w}), torch.arange(3), {"a": w})


def test_only_buffers_that_were_written_are_averaged():
    old = {"a": T(1), "b": T(2.0)}
    found = as_metrics((mean(w), {}, {"a": old["a"], "b": T(4.0)}), torch.arange(3), old)["buffers"]
    assert list(found) == [1] and found[1] == (12, 3)
