"""Rotary embeddings: what they are for, both conventions, tables that broadcast, and the kernel compiled ahead of time."""
import importlib
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fspeed.ops import rotary, rotary_table
from fspeed.ops.interpret import interpreted

WITHIN = [nullcontext, interpreted]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(-10**6, 10**6), st.integers(0, 10**7), st.booleans())
def test_products_see_the_distance_alone(p, distance, shift, interleaved):
    """At any position: the angles are those of float64."""
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(p))
    at = lambda x, position: rotary(x, rotary_table(torch.tensor(position), 16, dtype=torch.float64), interleaved)
    score = lambda start: at(q, start) @ at(k, start + distance)
    assert abs(score(p) - score(p + shift)) < 1e-6
    assert at(q, p).norm() == pytest.approx(q.norm())


@pytest.mark.parametrize("within", WITHIN)
def test_the_conventions_are_a_permutation_apart(within):
    x, table = torch.randn(3, 7, 10), rotary_table(torch.arange(7), 10)
    neighbours = torch.arange(10).view(5, 2).T.flatten()
    with within():
        torch.testing.assert_close(rotary(x, table, interleaved=True)[..., neighbours], rotary(x[..., neighbours], table))


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("shape", [(), (6,), (4, 1), (2, 1, 1), (1, 4, 6), (2, 4, 6), (2, 1, 6)], ids=str)
def test_tables_broadcast(shape, within):
    x = torch.randn(2, 4, 6, 8)
    table = rotary_table(torch.randint(0, 99, shape), 8)
    a, b = x.double().chunk(2, -1)
    turned = torch.complex(a, b) * torch.complex(*table.double().unbind(-2))
    with within():
        torch.testing.assert_close(rotary(x, table).double(), torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


def test_frequencies_and_interpolated_positions():
    positions, frequencies = torch.arange(5), 10_000. ** (-torch.arange(4) / 4)
    table = rotary_table(positions, 8)
    torch.testing.assert_close(rotary_table(positions, 8, frequencies=frequencies), table)
    torch.testing.assert_close(rotary_table(positions / 4, 8), rotary_table(positions, 8, frequencies=frequencies / 4))


@pytest.mark.parametrize("within", WITHIN)
def test_the_table_is_a_constant(within):
    x, table = torch.randn(3, 4), rotary_table(torch.arange(3), 4)
    with within():
        assert not torch.func.grad(lambda table: rotary(x, table).sum())(table).any()


def test_mistakes():
    with pytest.raises(ValueError, match=r"must broadcast to \(3, 2, 2\), got \(3, 2, 3\)"):
        rotary(torch.ones(3, 4), rotary_table(torch.arange(3), 6))
    with pytest.raises(ValueError, match="must broadcast"):
        rotary(torch.ones(3, 4), rotary_table(torch.arange(6).view(2, 3), 4))
    with pytest.raises(ValueError, match="dim must be even"):
        rotary_table(torch.arange(3), 5)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_spills_and_wide_loads(interleaved, forward, dtype, target):
    """Where half a head is a multiple of 16 numbers."""
    tl = pytest.importorskip("triton.language")
    from fspeed.ops.aot import compiled
    kernel = importlib.import_module("fspeed.ops.rope.kernel").kernel
    whole = ["N", "a_stride", "b_stride", "c_stride"]
    signature = {"x": f"*{dtype}", "y": f"*{dtype}", "table": "*fp32"} | dict.fromkeys([*whole, "M", "B", "C"], "i32")
    constants = dict(INTERLEAVED=interleaved, FORWARD=forward, WIDE=tl.float32, ROWS=16, BLOCK=64)
    got = compiled(kernel, signature, constants, target, divisible=whole)
    assert got.spills == 0
    threads = 4 * (64 if target == "gfx942" else 32)
    assert got.wide_loads >= 2048 * (4 if dtype == "fp32" else 2) // 16 // threads
