"""Bias, dropout and residual: the draws are fs.random's, however the batch is cut; the kernels compiled ahead of time."""
import importlib
from contextlib import nullcontext

import pytest
import torch

from fspeed import random
from fspeed.ops import bias_dropout_residual
from fspeed.ops.interpret import interpreted
from fspeed.ops.rowwise import patch

WITHIN = [nullcontext, interpreted]
KEY = random.key(3)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 41), (3, 2, 2, 7)], ids=str)
@pytest.mark.parametrize("by_rows", [False, True])
def test_draws_are_those_of_random(shape, within, by_rows):
    x, residual, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1:])
    key = random.Key(KEY, torch.randperm(shape[0]) + (1 << 33)) if by_rows else KEY
    with within():
        got = bias_dropout_residual(key, x, residual, 0.3, bias)
    torch.testing.assert_close(got, residual + random.dropout(key, x + bias, 0.3))


@pytest.mark.parametrize("within", WITHIN)
def test_parts_of_a_batch(within):
    x, residual = torch.randn(2, 6, 5)
    with within():
        whole = bias_dropout_residual(random.Key(KEY, torch.arange(6)), x, residual, 0.5)
        for part in (slice(0, 2), slice(2, 6)):
            got = bias_dropout_residual(random.Key(KEY, torch.arange(6)[part]), x[part], residual[part], 0.5)
            assert torch.equal(got, whole[part])


@pytest.mark.parametrize("within", WITHIN)
def test_keys_in_a_batch(within):
    """vmap over keys draws for each what it draws alone."""
    x, residual = torch.randn(2, 4, 5)
    keys = random.split(KEY, 3)
    with within():
        got = torch.vmap(lambda key: bias_dropout_residual(key, x, residual, 0.5))(keys)
    torch.testing.assert_close(got, torch.stack([bias_dropout_residual(key, x, residual, 0.5) for key in keys]))


@pytest.mark.parametrize("within", WITHIN)
def test_a_wider_residual_and_its_gradient(within):
    x, residual = torch.randn(4, 5).bfloat16(), torch.randn(4, 5)
    with within():
        y, pull = torch.func.vjp(lambda x, r: bias_dropout_residual(KEY, x, r, 0.5), x, residual)
        dy = torch.randn(4, 5)
        dx, dr = pull(dy)
    assert y.dtype == dr.dtype == torch.float32 and dx.dtype == torch.bfloat16
    assert torch.equal(dr, dy)
    torch.testing.assert_close(dx, random.dropout(KEY, dy, 0.5).bfloat16())


def test_without_randomness():
    x, residual, bias = torch.randn(4, 5), torch.randn(4, 5), torch.randn(5)
    for key, rate in ((None, 0.5), (KEY, 0)):
        assert torch.equal(bias_dropout_residual(key, x, residual, rate, bias), residual + (x + bias))
    assert torch.equal(bias_dropout_residual(KEY, x, residual, 1.), residual)


def test_mistakes():
    x = torch.ones(4, 5)
    for message, args in {
        "rate is a probability, got 2": (KEY, x, x, 2),
        r"residual must have x's shape, \(4, 5\), got \(5,\)": (KEY, x, x[0], 0.1),
        r"bias must have the shape of x's last dim, \(5,\), got \(4,\)": (KEY, x, x, 0.1, x[:, 0]),
        "the key has 3 rows": (random.Key(KEY, torch.arange(3)), x, x, 0.1),
    }.items():
        with pytest.raises(ValueError, match=message):
            bias_dropout_residual(*args)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [128, 4096])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_spills_and_wide_loads(name, dtype, n, target):
    """Where rows are multiples of 16 numbers."""
    tl = pytest.importorskip("triton.language")
    from fspeed.ops.aot import compiled
    kernel = getattr(importlib.import_module("fspeed.ops.dropouts.kernel"), name)
    types = {"key": "*i32", "starts": "*i64", "kept": "*u8", "db": "*fp32", "keep": "fp32", "M": "i32", "N": "i32", "PART": "i32"}
    signature = {arg: types.get(arg, f"*{dtype}") for arg in kernel.arg_names}
    cut = patch(n)
    constants = {"EACH": False} if name == "forward_kernel" else {}
    got = compiled(kernel, signature, {**constants, "WIDE": tl.float32, "ROWS": cut.rows, "BLOCK": cut.block}, target,
                   num_warps=cut.num_warps, divisible=["N"])
    assert got.spills == 0
    threads = cut.num_warps * (64 if target == "gfx942" else 32)
    assert got.wide_loads >= cut.rows * cut.block * (4 if dtype == "fp32" else 2) // 16 // threads
