"""Recompute gives the plain function's derivatives of every order, the same randomness, and keeps what it says it keeps."""
from collections import Counter

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fspeed as fs
from fspeed import optim, random
from fspeed.testing import assert_equal

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")     # the first jvp of a process


def plain(w, x):
    h = torch.sin(x @ w)
    return torch.sin(h @ w).sum()


def half(w, x):
    return torch.sin(x @ w)


REMATS = {
    "all": fs.remat(plain),
    "saving products": fs.remat(plain, save=lambda op: op is aten.mm.default),
    "saving sines": fs.remat(plain, save=lambda op: op is aten.sin.default),
    "nested": fs.remat(lambda w, x: fs.remat(half)(w, fs.remat(half)(w, x)).sum()),
}


def double_backward(f):
    def run(w, x):
        w = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(w, x), w, create_graph=True)
        return torch.autograd.grad((g**2).sum(), w)[0]

    return run


def two_backwards(f):
    """Through one forward, twice."""
    def run(w, x):
        w = w.clone().requires_grad_()
        out = f(w, x)
        first = torch.autograd.grad(out, w, retain_graph=True)[0]
        return first + torch.autograd.grad(out, w)[0]

    return run


ORDERS = {
    "grad": grad,
    "grad of grad": lambda f: grad(lambda w, x: (grad(f)(w, x) ** 2).sum()),
    "vmap of grad": lambda f: lambda w, x: vmap(grad(f), in_dims=(None, 0))(w, torch.stack([x, x + 1])),
    "grad of vmap": lambda f: grad(lambda w, x: vmap(f, in_dims=(None, 0))(w, torch.stack([x, x + 1])).sum()),
    "vjp": lambda f: lambda w, x: vjp(f, w, x)[1](torch.tensor(2.0, dtype=w.dtype)),
    "jvp": lambda f: lambda w, x: jvp(f, (w, x), (w + 1, x - 1)),
    "jvp of grad": lambda f: lambda w, x: jvp(grad(f), (w, x), (w + 1, x - 1)),
    "jacrev": lambda f: jacrev(grad(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "hessian": hessian,
    "double backward": double_backward,
    "two backwards": two_backwards,
    "traced": lambda f: lambda w, x: make_fx(grad(f))(w, x)(w, x),
}


@pytest.mark.parametrize("how", REMATS)
@pytest.mark.parametrize("order", ORDERS)
def test_derivatives_of_every_order_are_the_plain_functions(order, how):
    """Cases 39 and 40: law 6."""
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(3, 3, generator=g, dtype=torch.float64), torch.randn(2, 3, generator=g, dtype=torch.float64)
    got, expected = ORDERS[order](REMATS[how])(w, x), ORDERS[order](plain)(w, x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Ops(TorchDispatchMode):
    """How often each operation was done."""

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.done[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("save, products, sines", [
    (None, 4, 4), (lambda op: op is aten.mm.default, 2, 4), (lambda op: op is aten.sin.default, 4, 2), (lambda op: True, 2, 2),
])
def test_what_is_saved_is_not_computed_again(save, products, sines):
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    with Ops() as ops:
        out = fs.remat(plain, save=save)(w, x)
    with Ops() as again:
        torch.autograd.grad(out, w)
    backward = ops_of_backward(w, x)
    assert ops.done[aten.mm.default] + again.done[aten.mm.default] - backward[aten.mm.default] == products
    assert ops.done[aten.sin.default] + again.done[aten.sin.default] == sines


def ops_of_backward(w, x):
    out = plain(w, x)
    with Ops() as ops:
        torch.autograd.grad(out, w)
    return ops.done


@pytest.mark.parametrize("write", [lambda h: h.add_(1.0), torch.relu_, lambda h: torch._foreach_mul_([h], 2.0)])
def test_an_output_that_is_kept_may_be_written_over(write):
    """As by `h = x @ w; h += b`."""
    def f(w, x):
        h = x @ w
        write(h)
        return torch.tanh(h).sum()

    w, x = torch.randn(3, 3), torch.randn(2, 3)
    kept = fs.remat(f, save=lambda op: op is aten.mm.default)
    for order in (double_backward, two_backwards):
        assert torch.equal(order(kept)(w, x), order(f)(w, x))


def test_only_arguments_are_kept():
    kept = []
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    out = fs.remat(plain)(w, x)
    kept = out.grad_fn.saved_tensors
    assert sorted(t.data_ptr() for t in kept) == sorted((w.data_ptr(), x.data_ptr()))


# ---------------------------------------------------------------- randomness
@pytest.mark.parametrize("how", [lambda f: f, fs.remat, lambda f: fs.remat(fs.remat(f))])
def test_a_mask_is_the_same_in_recompute(how):
    """Case 37: the gradient of sum(dropout(x)) has the support of its value; by key, and by torch's own generator too."""
    x = torch.ones(1000, requires_grad=True)
    for drop in (lambda x: random.dropout(random.key(1), x, 0.5), lambda x: torch.nn.functional.dropout(x, 0.5)):
        out = how(drop)(x)
        torch.rand(3)
        (g,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(g, out.detach()) and 300 < (g > 0).sum() < 700


def test_torchs_generator_goes_on_as_without_checkpoint():
    def numbers(how):
        torch.manual_seed(0)
        x = torch.ones(5, requires_grad=True)
        out = how(lambda x: torch.nn.functional.dropout(x))(x)
        first = torch.rand(1)
        torch.autograd.grad(out.sum(), x)
        return out.detach(), first, torch.rand(1)

    assert_equal(numbers(fs.remat), numbers(lambda f: f), "torch's generator")


# ---------------------------------------------------------------- what would be lost
CLOSED = {
    "by name": lambda w: fs.remat(lambda x: x * w),
    "in a list": lambda w: (lambda ws: fs.remat(lambda x: x * ws[0]))([w]),
    "through a helper": lambda w: (lambda helper: fs.remat(lambda x: helper(x)))(lambda x: x * w),
    "as a default": lambda w: fs.remat(lambda x, w=w: x * w),
    "in an object": lambda w: (lambda m: fs.remat(lambda x: m(x)))(module_of(w)),
    "computed": lambda w: (lambda v: fs.remat(lambda x: x * v))(w * 2),
}


def module_of(w):
    m = torch.nn.Linear(1, 1, bias=False)
    m.weight = torch.nn.Parameter(w.detach().reshape(1, 1))
    return m


@pytest.mark.parametrize("how", CLOSED)
def test_a_differentiated_tensor_that_is_closed_over_is_refused(how):
    """Its gradient would be lost."""
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(TypeError, match="not among its arguments; under checkpoint its gradient would be lost"):
        CLOSED[how](torch.ones(1, requires_grad=True))(x).sum().backward()


def test_constants_and_other_results_pass():
    scale, table = torch.tensor(2.0), {"x": torch.ones(3)}
    f = lambda x, n: (x * scale + table["x"], {"n": n, "name": "a", "none": None, "int": x.argmax()})
    x = torch.ones(3, requires_grad=True)
    out, rest = fs.remat(f)(x, 3)
    assert rest["n"] == 3 and rest["name"] == "a" and rest["none"] is None and rest["int"] == 0
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [2, 2, 2]


def test_an_argument_that_comes_out_again():
    x = torch.ones(3, requires_grad=True)
    out = fs.remat(lambda x: (x, x * 2))(x)
    assert torch.autograd.grad((out[0] + out[1]).sum(), x)[0].tolist() == [3, 3, 3]


# ---------------------------------------------------------------- as a transform
def test_where_sees_names_depth_and_count():
    seen = []
    layer = fs.layer(lambda p, x: x * p["w"])
    step = fs.step(
        lambda p, b, key: fs.mean(layer(p["l"][1], layer(p["l"][0], b)) * p["r"]), optim.sgd(0.1), layers="l/*"
    )
    step = fs.checkpoint(step, where=lambda at: seen.append((at.names, at.index, at.depth, int(at.count))) or True)
    state = step.init({"l": [{"w": torch.ones(1)}, {"w": torch.ones(1)}], "r": torch.ones(1)})
    step(step(state, torch.ones(2, 1))[0], torch.ones(2, 1))
    assert seen == [("l/0", 0, 2, 0), ("l/1", 1, 2, 0), ("l/0", 0, 2, 1), ("l/1", 1, 2, 1)]
