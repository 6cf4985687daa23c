"""Layers and the handles that stand for them: plain functions on plain trees, and closed to all but layer functions."""
from collections import namedtuple

import pytest
import torch

import fspeed as fs
from fspeed import optim
from fspeed.layer import lookup
from fspeed.testing import assert_close

T = torch.tensor
scale = fs.layer(lambda p, x: x * p["w"])
Pair = namedtuple("Pair", "w b")


def run(loss, params, layers, batch=None):
    step = fs.step(loss, optim.sgd(0.5), layers=layers)
    state, metrics = step(step.init(params), torch.arange(1.0, 4.0) if batch is None else batch)
    return step.params(state), metrics["loss"]


def test_on_a_plain_tree_a_layer_is_its_function():
    assert scale({"w": T(2.0)}, T(3.0)) == 6 == scale({"w": T(2.0)}, x=T(3.0))
    assert fs.layer(max)(3, 4) == 4


MISUSED = {
    "indexed": lambda h: h["w"],
    "asked for .w": lambda h: h.w,
    "asked for .sum": lambda h: h.sum(),
    "iterated over": lambda h: list(h),
    "counted": lambda h: len(h),
    "used with __mul__": lambda h: h * 2,
    "used with __rmatmul__": lambda h: [1.0] @ h,
    "used with __pow__": lambda h: h ** 2,
    "given to __mul__|used with __rmul__": lambda h: torch.ones(3) * h,
    "given to sum": lambda h: torch.sum(h),
    "given to stack": lambda h: torch.stack([torch.ones(3), h]),
    "given to linear": lambda h: torch.nn.functional.linear(torch.ones(3), weight=h),
}


@pytest.mark.parametrize("how", MISUSED)
def test_a_handle_is_closed_outside_layer_functions(how):
    with pytest.raises(TypeError, match=f"layer 'l/0' were ({how}).*fs.layer.*layers="):
        run(lambda p, batch, key: fs.mean(MISUSED[how](p["l"][0])), {"l": [{"w": T(1.0)}]}, "l/*")


def test_a_handle_shows_its_name():
    seen = []
    run(lambda p, batch, key: seen.append(repr(p["l"])) or fs.mean(scale(p["l"], batch)), {"l": {"w": T(1.0)}}, "l")
    assert seen == ["<parameters of layer 'l'>"]


def test_a_layer_may_take_several_groups():
    both = fs.layer(lambda ps, x: x * ps[0]["w"] + ps[1]["w"])
    params = {"l": [{"w": T(1.0)}, {"w": T(2.0)}]}
    loss = lambda p, batch, key: fs.mean(both((p["l"][0], p["l"][1]), batch) ** 2)
    assert_close(run(loss, params, "l/*"), run(loss, params, ()), 0.0, "a tuple of layers")


def test_a_layer_may_be_a_single_tensor_or_any_node():
    one = fs.layer(lambda p, x: torch.tanh(p * x))
    pair = fs.layer(lambda p, x: torch.tanh(p.w * x + p.b))
    params = {"a": [T(1.0), T(2.0)], "b": Pair(T(0.5), T(0.1)), "c": {}, "d": None}
    loss = lambda p, batch, key: fs.mean(pair(p["b"], one(p["a"][1], one(p["a"][0], batch))))
    assert_close(run(loss, params, ["a/*", "b"]), run(loss, params, ()), 0.0, "odd layers")


def test_a_layer_is_called_inside_another_with_the_same_parameters():
    outer = fs.layer(lambda p, x: x + scale(p["inner"], x))
    params = {"l": {"inner": {"w": T(2.0)}}}
    loss = lambda p, batch, key: fs.mean(outer(p["l"], batch))
    assert_close(run(loss, params, "l"), run(loss, params, ()), 0.0, "a layer in a layer")


# ---------------------------------------------------------------- losses made of a list of layers
def tied():
    return fs.sequential([
        ("table", lambda p, x, batch, key: p["w"] * batch[:, None]),
        (["mix", "bias"], lambda ps, x, batch, key: torch.tanh(x @ ps[0]["w"]) + ps[1]["w"]),
        ("table", lambda p, x, batch, key: fs.mean((x * p["w"]).sum(-1) ** 2)),
    ])


def test_sequential_is_the_loss_written_out():
    """The same name twice is a tie: its gradient is the sum of both uses."""
    def plain(p, batch, key):
        x = torch.tanh((p["table"]["w"] * batch[:, None]) @ p["mix"]["w"]) + p["bias"]["w"]
        return fs.mean((x * p["table"]["w"]).sum(-1) ** 2)

    g = torch.Generator().manual_seed(0)
    params = {n: {"w": torch.randn(*s, generator=g)} for n, s in {"table": (3,), "mix": (3, 3), "bias": (3,)}.items()}
    loss = tied()
    assert loss.names == ["table", "mix", "bias"]
    assert_close(run(loss, params, loss.names), run(plain, params, ()), 1e-6, "sequential")


def test_parts_of_sequential_have_keys_of_their_own():
    keys = []

    def part(p, x, batch, key):
        keys.append(key if key is None else key.data.tolist())
        return batch * p if x is None else fs.mean(x * p)

    loss = fs.sequential([("a", part), ("b", part)])
    step = fs.step(loss, optim.sgd(0.1), layers=loss.names)
    state = step.init({"a": T(1.0), "b": T(1.0)})
    step(state, torch.ones(2))
    step.evaluate(state, torch.ones(2))
    assert keys[0] != keys[1] and keys[2:] == [None, None]


def test_lookup():
    assert lookup({"a": [{"b": 1}, {"b": 2}]}, "a/1/b") == 2
