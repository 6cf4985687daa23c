"""Kernels of optimizers: on stretches of any size, in parts and compiled, what `update` gives."""
import pytest
import torch

from fspeed import optim
from fspeed.ops.interpret import interpreted
from fspeed.optim import kernels
from fspeed.optim.kernels import ready
from fspeed.optim.updates import apply_updates
from fspeed.shard.pytree import tree_map
from fspeed.testing import assert_close

OPTIMIZERS = {
    "adamw masked": lambda: optim.adamw(0.1, weight_decay=0.1, mask={"b": False, "w": True}),
    "lion": lambda: optim.lion(0.1, weight_decay=0.1),
    "lion masked": lambda: optim.lion(optim.linear_schedule(0.1, 0.0, 8), weight_decay=0.1, mask={"b": False, "w": True}),
    "lamb": lambda: optim.lamb(0.1, weight_decay=0.1),
    "lamb masked": lambda: optim.lamb(0.1, weight_decay=0.1, mask={"b": False, "w": True}, max_ratio=2.0),
    "lamb of DeepSpeed": lambda: optim.lamb(0.1, eps=1e-8, min_ratio=0.01, max_ratio=10, debias_rate=True),
    "sgd momentum": lambda: optim.sgd(0.1, 0.9),
    "sgd nesterov": lambda: optim.sgd(optim.linear_schedule(0.1, 0.0, 8), 0.9, nesterov=True),
}


def tree(seed: int, dtype: torch.dtype) -> dict:
    """A matrix whose memory is transposed, and a vector."""
    g = torch.Generator().manual_seed(seed)
    return {"b": torch.randn(37, generator=g).to(dtype), "w": torch.randn(30, 20, generator=g).to(dtype).T}


def check(opt: optim.GradientTransformation, dtype: torch.dtype, tolerance: float, where: str) -> None:
    params = tree(0, dtype)
    mine, state = tree_map(torch.clone, params), opt.init(params)
    mine_state = opt.init(params)
    for i in range(3):
        updates, state = opt.update(tree(1 + i, dtype), state, params)
        params = apply_updates(params, updates)
        mine, mine_state = opt.apply(tree(1 + i, dtype), mine_state, mine)
        assert_close((mine, mine_state), (params, state), tolerance, where)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_parts(name, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(kernels, "PART", 64)
    check(OPTIMIZERS[name](), dtype, tolerance, name)


@pytest.mark.parametrize("name", ["adamw masked", "lion masked", "lamb masked"])
def test_compiled(name, monkeypatch):
    if not kernels.compiles():
        pytest.skip("torch.compile does not work here")
    monkeypatch.setattr(kernels, "BIG", 64)
    monkeypatch.setattr(kernels, "LONG", 1)
    monkeypatch.setattr(kernels, "PART", 8)
    check(OPTIMIZERS[name](), torch.float32, 2e-6, name)


def test_without_a_compiler_it_goes_in_parts(monkeypatch):
    monkeypatch.setattr(kernels, "BIG", 64)
    monkeypatch.setattr(kernels, "compiles", lambda: False)
    check(OPTIMIZERS["lamb"](), torch.float32, 2e-6, "lamb")


def test_sums_of_parts_are_added(monkeypatch):
    monkeypatch.setattr(kernels, "PART", 8)
    row = (torch.arange(20.0),)
    total = ready(lambda x, numbers: torch.stack([x.sum(), numbers[0] * x.square().sum()]), [row])(row, 2.0)
    torch.testing.assert_close(total, torch.tensor([190.0, 4940.0]))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("name", ["adamw masked", "lion", "lion masked"])
def test_tritons_kernels(name, dtype, tolerance, monkeypatch):
    """As on a GPU, interpreted; and that they are what runs."""
    pytest.importorskip("triton")
    from fspeed.ops.optimizers import kernel
    launches, launch = [], kernel.launch
    monkeypatch.setattr(kernels, "LAUNCH", 1)
    monkeypatch.setattr(kernel, "launch", lambda *args, **named: launches.append(1) or launch(*args, **named))
    with interpreted():
        check(OPTIMIZERS[name](), dtype, tolerance, name)
    assert len(launches) == 6
