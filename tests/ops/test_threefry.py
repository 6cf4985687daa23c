"""Threefry2x32: known answers, and each path against the reference."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fspeed.ops.threefry import cpu, reference, threefry_bits, threefry_pairs, threefry_uniform
from fspeed.ops.threefry.dispatch import dispatch

OUTPUTS = ("pairs", "bits", "uniform")
KEY = torch.tensor([-1640531527, 123456789], dtype=torch.int32)
STARTS = {                                             # among them such that the counter's upper word changes on the way
    "first": 0, "small": 5, "carry": 2**32 - 3, "large": 2**40 + 1, "negative": -2, "scalar": torch.tensor(2**33 - 1),
    "rows": torch.tensor([3, 2**32 - 2, 2**45]), "matrix": torch.tensor([[1], [-7]]), "many": torch.arange(33) * 2**31,
    "none": torch.zeros(0, dtype=torch.int64),
}
SIZES = (0, 1, 2, 7, 63, 130, 781)


def words(*hexadecimal):
    return [int(h, 16) - (int(h, 16) >> 31 << 32) for h in hexadecimal]


# Random123's kat_vectors, threefry2x32 with 20 rounds: counter, key, result
@pytest.mark.parametrize("counter, key, result", [
    (("00000000", "00000000"), ("00000000", "00000000"), ("6b200159", "99ba4efe")),
    (("ffffffff", "ffffffff"), ("ffffffff", "ffffffff"), ("1cb996fc", "bb002be7")),
    (("243f6a88", "85a308d3"), ("13198a2e", "03707344"), ("c4923a9c", "483df7a0")),
])
@pytest.mark.parametrize("path", [reference, cpu])
def test_known_answers(path, counter, key, result):
    upper, lower = words(*counter)
    key, start = torch.tensor(words(*key), dtype=torch.int32), upper << 32 | lower & 0xFFFFFFFF
    assert path.pairs(key, start, 1).tolist() == [words(*result)]
    assert path.pairs(key, start - 8, 9)[8].tolist() == words(*result)      # more than a few


def same(path, start, n):
    for name in OUTPUTS:
        got, want = getattr(path, name)(KEY, start, n), getattr(reference, name)(KEY, start, n)
        assert got.dtype == want.dtype and got.shape == want.shape, name
        assert torch.equal(got, want), name


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_cpu_is_the_reference(start, n):
    same(cpu, start, n)


@pytest.mark.parametrize("start, n", [
    (0, cpu.BLOCK), (2**32 - cpu.BLOCK, 2 * cpu.BLOCK + 17), (torch.tensor([9, 2**33]), cpu.BLOCK + 1),
    (torch.arange(700) * 63, 63),
], ids=["one", "carry", "rows", "many"])
def test_cpu_is_the_reference_in_many_blocks(start, n):
    same(cpu, start, n)


@given(st.integers(-2**31, 2**31 - 1), st.integers(-2**31, 2**31 - 1), st.integers(-2**63, 2**63 - 10), st.integers(0, 9))
def test_the_hash_in_integers_is_the_hash_in_tensors(k0, k1, start, n):
    key = torch.tensor([k0, k1], dtype=torch.int32)
    assert torch.equal(cpu.pairs(key, start, n), reference.pairs(key, start, n))


@pytest.fixture
def interpreted(monkeypatch):
    """The Triton path on CPU tensors, by Triton's interpreter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from fspeed.ops.threefry import kernel
    for name in ("draw", "threefry2x32", "mix"):
        monkeypatch.setattr(kernel, name, interpreter.InterpretedFunction(getattr(kernel, name).fn))
    return kernel


@pytest.mark.parametrize("n", [0, 1, 63, 781])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_kernel_is_the_reference(interpreted, start, n):
    same(interpreted, start, n)


def test_kernel_of_rows_too_long_for_32_bits(interpreted, monkeypatch):
    out = torch.zeros(1024, dtype=torch.int32)
    n, starts = 2**33, torch.tensor([5, 2**40])
    interpreted.draw[(1,)](KEY, starts, out, n, 1024, "bits", True, 1024)
    assert torch.equal(out, reference.bits(KEY, 5, 1024))


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
def test_kernel_compiles(target, output, monkeypatch):
    """Ahead of time, without a GPU: types above all, which the interpreter lets pass."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")                    # Triton 3.9 warns when it is unset
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fspeed.ops.threefry import kernel
    types = {"key": "*i32", "starts": "*i64", "out": "*fp32" if output == "uniform" else "*i32", "n": "i32", "draws": "i64"}
    constants = {"KIND": output, "LONG": False, "BLOCK": kernel.BLOCK}
    signature = {name: types.get(name, "constexpr") for name in kernel.draw.arg_names}
    assert triton.compile(ASTSource(kernel.draw, signature, constants), target=GPUTarget(*target)).asm


@pytest.mark.gpu
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_gpu_is_the_reference(start, n):
    key, start = KEY.cuda(), start.cuda() if isinstance(start, torch.Tensor) else start
    for output in (threefry_pairs, threefry_bits, threefry_uniform):
        got = output(key, start, n)
        assert got.is_cuda and torch.equal(got.cpu(), output(KEY, start.cpu() if isinstance(start, torch.Tensor) else start, n))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")           # torch's, in its first jvp
@pytest.mark.parametrize("n", [2, 781])
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "kernel"])
def test_draws_while_torch_func_is_at_work(gpu, n, request):
    """Where whatever torch allocates or touches is wrapped: starts made there too."""
    path, starts, seen = request.getfixturevalue("interpreted") if gpu else cpu, torch.tensor([3, 2**32 - 2]), []

    def draws(x):
        chosen, key, start = dispatch(KEY + 0, starts * 1)
        assert chosen is cpu
        for name in OUTPUTS:
            seen.append(getattr(path, name)(key, start, n))
            seen.append(getattr(path, name)(key, 7, n))
        return x * 2

    torch.func.grad(draws)(torch.tensor(1.0))
    torch.func.vmap(torch.func.jacfwd(draws))(torch.ones(2))
    want = [getattr(reference, name)(KEY, start, n) for name in OUTPUTS for start in (starts, 7)]
    for got, expected in zip(seen, want * 2, strict=True):
        assert torch.equal(got, expected)


class Wrapped(torch.autograd.Function):
    """Saves the key, which comes back to backward in functorch's wrapper."""
    @staticmethod
    def forward(x, key):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        key, = ctx.saved_tensors
        path, *_ = dispatch(key, 0)
        return g * threefry_uniform(key, 0, 3), torch.full((), path is cpu)


def test_paths():
    """Keys that can be read go to the CPU path, also under torch.func.grad; batched and traced ones to the reference."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    seen = []

    def look(key, start=0):
        seen.append(dispatch(key, start)[0])
        return key + start

    look(KEY)
    torch.func.vjp(lambda x: x * look(KEY)[0], torch.ones(2))
    assert seen == [cpu] * 2
    torch.vmap(look)(KEY[None])
    torch.vmap(look, in_dims=(None, 0))(KEY, torch.arange(2))
    make_fx(lambda key: look(key))(KEY)
    torch.func.functionalize(look)(KEY)
    with FakeTensorMode() as mode:
        look(mode.from_tensor(KEY), 0)
    assert seen[2:] == [reference] * 5


def test_a_key_saved_for_backward_is_read():
    x = torch.ones(3)
    got = torch.func.grad(lambda x: Wrapped.apply(x, KEY).sum())(x)
    assert torch.equal(got, threefry_uniform(KEY, 0, 3))


def test_a_key_costs_one_tensor_operation():
    class Count(TorchDispatchMode):
        operations = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += (str(function),)
            return function(*args, **kwargs or {})

    with Count() as count:
        threefry_pairs(KEY, 7, 1)
    assert count.operations == ("aten.lift_fresh.default",)
