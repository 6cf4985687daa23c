"""How ops are made: each way a function is used, with a backward of its own and with its reference's."""
import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap
from torch.nn.functional import gelu

from fspeed.ops.interpret import interpreted, on
from fspeed.ops.op import Paths, op, plain_on_cpu
from fspeed.testing.ops import check_op

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def bias_gelu_kernel(x, b, out, n, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(x + i, i < n, 0).to(tl.float32) + tl.load(b + i % columns, i < n, 0).to(tl.float32)
    tl.store(out + i, (0.5 * u * (1 + tl.erf(u * 0.7071067811865476))).to(out.dtype.element_ty), i < n)


def kernel(x, b):
    out = torch.empty(x.shape, dtype=x.dtype)
    on(bias_gelu_kernel, x)[(triton.cdiv(x.numel(), 64),)](x.contiguous(), b.contiguous(), out, x.numel(), b.numel(), BLOCK=64)
    return out


def plain(x, b):
    return gelu(x + b)


def backward(grads, inputs, outputs):
    u = inputs[0] + inputs[1]
    g = grads[0] * (0.5 * (1 + torch.erf(u * 2**-0.5)) + u * torch.exp(-0.5 * u * u) * (2 * torch.pi) ** -0.5)
    return g, g.sum_to_size(inputs[1].shape)


OWN = op("test_bias_gelu(Tensor x, Tensor b) -> Tensor", plain, kernel, backward=Paths(backward, backward))
REFERENCE = op("test_bias_gelu_plain(Tensor x, Tensor b) -> Tensor", plain, kernel)
X, B, XS = torch.randn(6, 8), torch.randn(8), torch.randn(5, 6, 8)


def squares(f):
    return lambda x, b: (f(x, b) ** 2).sum()


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager")


USES = {
    "forward": lambda f: f(X, B),
    "grad": lambda f: grad(squares(f), (0, 1))(X, B),
    "vjp": lambda f: vjp(f, X, B)[1](X),
    "jvp": lambda f: jvp(f, (X, B), (X, B)),
    "grad of grad": lambda f: grad(lambda x: (grad(squares(f))(x, B) ** 2).sum())(X),
    "grad of grad of grad": lambda f: grad(lambda x: grad(lambda x: (grad(squares(f))(x, B) ** 2).sum())(x).sum())(X),
    "hessian": lambda f: hessian(lambda x: squares(f)(x, B))(X[:1]),
    "vmap": lambda f: vmap(f, (0, None))(XS, B),
    "vmap of both": lambda f: vmap(f)(XS, torch.stack([B] * 5)),
    "vmap of grad": lambda f: vmap(grad(squares(f), (0, 1)), (0, None))(XS, B),
    "grad of vmap": lambda f: grad(lambda x: vmap(f, (0, None))(x, B).sum())(XS),
    "vmap of grad of grad": lambda f: vmap(grad(lambda x: (grad(squares(f))(x, B) ** 2).sum()))(XS),
    "jvp of grad": lambda f: jvp(lambda x: grad(squares(f))(x, B), (X,), (X,)),
    "compile": lambda f: compiled(f)(X, B),
    "compile of grad": lambda f: compiled(grad(squares(f), (0, 1)))(X, B),
    "compile of vmap of grad": lambda f: compiled(vmap(grad(squares(f)), (0, None)))(XS, B),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", [OWN, REFERENCE], ids=["own", "reference"])
def test_an_op_is_its_reference(made, use):
    torch.testing.assert_close(USES[use](made), USES[use](plain), rtol=1e-4, atol=1e-5)


def test_plain_autograd_takes_it():
    x = X.clone().requires_grad_()
    squares(OWN)(x, B).backward()
    torch.testing.assert_close(x.grad, grad(squares(plain))(X, B))


def test_a_backward_of_its_own_is_what_runs():
    """Everywhere, compiled too: one that differs on purpose from what autodiff would give."""
    lies = op("test_lies(Tensor x, Tensor b) -> Tensor", plain, kernel, backward=Paths(*[lambda g, i, o: (g[0] * 7, i[1] * 0)] * 2))
    for use in (lambda f: f, compiled):
        assert torch.equal(use(grad(lambda x: lies(x, B).sum()))(X), torch.full_like(X, 7))
    assert not torch.equal(vmap(lambda x: vjp(lies, x, B)[1](x)[0])(XS), 7 * XS)        # batches are the reference's


@pytest.mark.parametrize("shape", [(1,), (17,), (0, 3), (9, 7, 41)], ids=str)
@pytest.mark.parametrize("made", [OWN, REFERENCE], ids=["own", "reference"])
def test_the_contract(made, shape):
    check_op(made, torch.randn(shape), torch.randn(shape[-1:]))


def test_the_contract_sees_what_is_wrong():
    wrong = {
        "values": dict(cpu=lambda x, b: plain(x, b) * 1.001),
        "gradients": dict(backward=Paths(lambda g, i, o: [x * 1.01 for x in backward(g, i, o)], backward)),
        "kernel": dict(cuda=lambda x, b: plain(x, b) * 1.001),
        "write": dict(cpu=lambda x, b: plain(x, b) + 0 * x.add_(1) if x.dtype == torch.float32 else plain(x, b)),
        "traced": dict(fake=lambda x, b: x.new_empty(x.shape, dtype=torch.float64)),
    }
    for i, (word, parts) in enumerate(wrong.items()):
        bad = op(f"test_wrong{i}(Tensor x, Tensor b) -> Tensor", plain, **{"cuda": kernel, **parts})
        with pytest.raises((AssertionError, RuntimeError), match=word if word != "write" else "(values|arguments)"):
            check_op(bad, torch.randn(3, 4), torch.randn(4))


def test_interpreted_kernels_run_only_where_asked():
    calls = []
    spy = op("test_spy(Tensor x) -> Tensor", lambda x: x + 1, cuda=lambda x: calls.append(1) or x + 1)
    spy(X)
    assert not calls
    with interpreted():
        spy(X)
    assert calls


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def twice_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, twice(tl.load(x + i)))


def test_the_interpreter_leaves_tritons_language_as_it_was():
    before = [dict(vars(part)) for part in (tl, tl.core, tl.tensor, tl.dtype)]
    x = torch.arange(8.)
    out = torch.empty(8)
    on(twice_kernel, x)[(1,)](x, out, BLOCK=8)
    assert torch.equal(out, 2 * x)
    assert [dict(vars(part)) for part in (tl, tl.core, tl.tensor, tl.dtype)] == before


def test_an_op_of_many_results_without_a_backward_of_its_own_has_second_derivatives():
    """Also where some arguments are tensors without derivatives, or absent."""
    plain = lambda x, y, n, z: (x * y.sin() * n[0], y * x.exp())
    made = op("test_many(Tensor x, Tensor y, Tensor n, Tensor? z) -> (Tensor, Tensor)", plain, plain)
    check_op(made, torch.randn(7), torch.randn(7), torch.tensor([2]), None, kernels=False)


def test_inputs_share_a_gradient_without_a_copy():
    """And are right in every derivative: x + y + z, where y's gradient is x's, and z's is the output's."""
    add = lambda x, y, z: (x + y) ** 2 + z
    shared = op("test_shared(Tensor x, Tensor y, Tensor z) -> Tensor", add, add,
                backward=Paths(*[lambda g, i, o: [2 * g[0] * (i[0] + i[1])]] * 2), alike={1: 0, 2: ~0})
    check_op(shared, X, X.flip(0), X.sin(), kernels=False)
    dy = torch.randn(X.shape)
    dx, dy_, dz = vjp(shared, X, X, X)[1](dy)
    assert dx.data_ptr() == dy_.data_ptr() and dz.data_ptr() == dy.data_ptr()


def test_inputs_without_a_gradient():
    """As constants: their gradient is zero, and nothing computes it."""
    scaled = op("test_constant(Tensor x, Tensor by) -> Tensor", lambda x, by: x * by.detach(), None,
                backward=Paths(*[lambda g, i, o: [g[0] * i[1]]] * 2), alike={1: None})
    check_op(scaled, X, X.flip(0), kernels=False)
    assert not vjp(scaled, X, X)[1](X)[1].any()


def test_plain_on_cpu_is_the_reference_there():
    """And the op where kernels are interpreted."""
    seven = plain_on_cpu(op("test_plain(Tensor x) -> Tensor", lambda x: x + 1, cuda=lambda x: torch.full_like(x, 7.)))
    assert torch.equal(seven(X), X + 1)
    with interpreted():
        assert torch.equal(seven(X), torch.full_like(X, 7.))
