"""Pull-backs by plain autograd and by torch.func are one; frozen leaves have none; what a function closes over is found."""
import functools
import threading

import pytest
import torch

from fspeed.grad import closed_over, in_backward, in_jvp, in_torch_func, in_trace, vjp, watched
from fspeed.shard.piece import Frozen
from fspeed.testing import assert_equal

T = torch.tensor
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")     # the first jvp of a process


def f(tree):
    out = {"a": (tree["x"] * tree["y"]).sin(), "b": tree["x"] ** 2}
    return out, {"aux": tree["x"] + 1, "name": 3}


def pulled(x):
    out, pull, aux = vjp(f, {"x": x, "y": T(2.0)})
    return out, pull({"a": T(1.0), "b": T(3.0)}), aux["aux"]


def test_plain_and_watched_are_one():
    plain = pulled(T(0.5))
    assert_equal(torch.func.vmap(pulled)(T([0.5])), torch.utils._pytree.tree_map(lambda x: x[None], plain), "vmap")
    out, grads, _ = pulled(T(0.5))
    assert not any(x.requires_grad for x in (*out.values(), *grads.values()))
    torch.testing.assert_close(grads["x"], torch.cos(T(1.0)) * 2 + 3)


def test_derivatives_go_through_a_pull_back():
    second = torch.func.grad(lambda x: pulled(x)[1]["x"])(T(0.5))
    torch.testing.assert_close(second, -torch.sin(T(1.0)) * 4 + 6)
    x = T(0.5, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(pulled(x)[1]["x"], x)[0], second)
    torch.testing.assert_close(torch.func.jvp(lambda x: pulled(x)[1]["x"], (T(0.5),), (T(1.0),))[1], second)


def test_frozen_leaves_have_no_cotangent():
    _, pull, _ = vjp(lambda t: (t["w"] * t["s"].value, None), {"w": T(2.0), "s": Frozen(T(3.0))})
    assert pull(T(1.0)) == {"w": 3, "s": ()}


def test_what_is_not_used_has_zeros():
    for out in (lambda t: t["a"] * 2, lambda t: T(1.0)):
        _, pull, _ = vjp(lambda t, out=out: (out(t), None), {"a": T(1.0), "b": torch.ones(2)})
        assert pull(T(1.0))["b"].tolist() == [0, 0]


def test_no_grad_outside_changes_nothing():
    with torch.no_grad():
        assert_equal(pulled(T(0.5)), pulled(T(0.5)), "no_grad")
        assert pulled(T(0.5))[1]["x"] != 0


def test_who_watches():
    w = T(1.0, requires_grad=True)
    seen = {}
    assert watched({"w": w}) and not watched({"w": w.detach()}) and not watched({"n": 3})
    with torch.no_grad():
        assert not watched(w)
    torch.func.grad(lambda x: seen.update(func=in_torch_func(), jvp=in_jvp(), watched=watched()) or x)(T(1.0))
    assert seen == {"func": True, "jvp": False, "watched": True}
    torch.func.jvp(lambda x: seen.update(jvp=in_jvp()) or x, (T(1.0),), (T(1.0),))
    assert seen["jvp"] and not in_jvp() and not in_torch_func() and not in_trace() and not in_backward()


def test_in_backward_is_of_this_thread():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            other = threading.Thread(target=lambda: seen.append(in_backward()))
            other.start()
            other.join()
            seen.append(in_backward())
            return g

    Spy.apply(T(1.0, requires_grad=True)).backward()
    assert seen == [False, True]


GLOBAL = T(4.0)
x, y = T(1.0), T(2.0)


class Bound:
    def method(self, t):
        return t * GLOBAL


def holding():
    inner = lambda t: t * x_
    x_, pair = x, {"y": [y]}
    return lambda t: inner(t) + pair["y"][0]


@pytest.mark.parametrize("fn, expected", [
    (holding(), {"x_": x, "pair": y}), (functools.partial(max, x, key=y), {"argument 0": x, "key": y}),
    (lambda t, a=x: t, {"default 0": x}),
    (Bound().method, {"GLOBAL": GLOBAL}), (torch.sin, {}), (torch.nn.Linear(2, 2), {}), (lambda t: unassigned(), {}),  # noqa: F821
])
def test_what_a_function_closes_over(fn, expected):
    assert dict(closed_over(fn)) == expected


def test_a_variable_that_is_not_assigned_yet_is_nothing():
    def outer():
        found = dict(closed_over(lambda: later))
        later = T(1.0)
        return found, later

    assert outer()[0] == {}
