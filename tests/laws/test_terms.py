"""A loss of several terms, each with a mask of its own: every split gives the sum of the terms' means over the whole batch."""
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

import fspeed as fs
from fspeed import optim
from fspeed.shard.pytree import tree_map
from fspeed.testing import assert_close, mesh, ranks, splits, stacks
from fspeed.testing.stacks import stacked

PARAMS = {"w": torch.tensor([1.0, -2.0]), "l": {"v": torch.tensor(0.5)}}
BATCH = {
    "x": torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8], [9, 1]]),
    "a": torch.tensor([1.0, 0, 0, 0, 1]), "b": torch.tensor([0.0, 1, 1, 1, 0]),
}


def terms(p, batch, key):
    y = batch["x"] @ p["w"]
    z = scaled(p["l"], y)
    return {"a": fs.mean(y**2, batch["a"]), "b": fs.mean(z.abs(), batch["b"])}


scaled = fs.layer(lambda p, y: p["v"] * y)
weights = lambda batch: {"a": batch["a"].sum(), "b": batch["b"].sum()}


def gradients(stack, split):
    step = stacked(fs.step(terms, optim.sgd(1.0), layers="l", weights=weights), stack, mesh(data=len(split)))
    state, metrics = step(step.init(PARAMS), tree_map(lambda x: x.split(list(split))[dist.get_rank()], BATCH))
    return {"params": step.params(state), "metrics": {k: metrics[k] for k in ("a", "b", "loss")}}


def test_it_is_the_sum_of_the_means():
    w, v = PARAMS["w"].clone().requires_grad_(), PARAMS["l"]["v"].clone().requires_grad_()
    y = BATCH["x"] @ w
    loss = (y**2 * BATCH["a"]).sum() / 2 + ((v * y).abs() * BATCH["b"]).sum() / 3
    g, h = torch.autograd.grad(loss, (w, v))
    got = ranks(1)(gradients, (), (5,))[0]
    assert_close(got["params"], {"w": PARAMS["w"] - g, "l": {"v": PARAMS["l"]["v"] - h}}, 1e-6, "bare")
    assert got["metrics"]["loss"] == pytest.approx(loss.item())


@given(stacks(2, most=2).filter(lambda s: not {"bf16", "fp16"} & set(s)), splits(5, 2))
@settings(max_examples=10)
def test_on_any_split(stack, split):
    expected = ranks(1)(gradients, (), (5,))[0]
    for got in ranks(2)(gradients, stack, split):
        assert_close(got, expected, 1e-5, f"{stack} on {split}")


def test_terms_that_are_not_those_weighed():
    step = fs.step(lambda p, batch, key: {"a": fs.mean(batch["x"])}, optim.sgd(1.0), weights=weights)
    with pytest.raises(TypeError, match=r"\['a', 'b'\], got \['a'\]"):
        step(step.init(PARAMS), BATCH)
