"""unscale_clip: against torch's clipping and fspeed.optim's, what is not finite, parts; its kernels compiled."""
import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fspeed import optim
from fspeed.ops import aot
from fspeed.ops.clipping import unscale_clip
from fspeed.ops.interpret import interpreted

pytest.importorskip("triton")
from fspeed.ops.clipping import kernel
from fspeed.ops.optimizers.kernel import elements

PATHS = (interpreted, contextlib.nullcontext)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
       st.sampled_from([0.5, 2.0**-10]), st.sampled_from([0.0, 0.5, 1e9]))
def test_the_norm_and_the_clip_are_torchs(sizes, dtype, scale, max_norm):
    draw = torch.Generator().manual_seed(sum(sizes))
    gs = [torch.randn(n, generator=draw).to(dtype) for n in sizes]
    wide = [g.float() * scale for g in gs]
    for within in PATHS:
        with within():
            by, norm, finite = unscale_clip(*gs, scale=scale, max_norm=max_norm)
        assert finite
        exact = torch.linalg.vector_norm(torch.cat(wide).double()).float()
        torch.testing.assert_close(norm, exact, rtol=3e-6, atol=0)      # a float32 sum of 20,000 squares: some tens of roundings
        want = optim.clip_by_global_norm(max_norm).update(wide, ())[0]
        torch.testing.assert_close([g.float() * by for g in gs], want, rtol=5e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen(bad):
    for at in (0, 4095, 4096, 8999):
        g = torch.ones(9000)
        g[at] = bad
        for within in PATHS:
            with within():
                by, _, finite = unscale_clip(torch.ones(5), g, max_norm=1.0)
            assert not finite
            assert by == 0


def test_parts_clip_as_the_whole():
    g, sums = torch.randn(100), []
    for part in g.split(40):
        unscale_clip(part, summed=lambda s: sums.append(s) or s)
    for part in g.split(40):
        torch.testing.assert_close(unscale_clip(part, max_norm=1.0, summed=lambda s: sum(sums)), unscale_clip(g, max_norm=1.0))


def test_a_gradient_goes_through_and_nothing_is_an_error():
    g = torch.tensor([3.0, 4.0])
    assert torch.allclose(torch.func.grad(lambda g: unscale_clip(g).norm)(g), g / 5)
    with pytest.raises(ValueError, match="at least one"):
        unscale_clip()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_spills_and_wide_loads(dtype, target):
    signature = {"x": f"*{dtype}", "sums": "*fp32", "n": "i64", "programs": "i32", "out": "*fp32"}
    block = 4 * elements(target == "gfx942")
    made = aot.compiled(kernel.sum_of_squares_kernel, signature, {"BLOCK": block}, target, divisible=("n",), **kernel.CONFIG)
    assert made.spills == 0, made
    assert made.wide_loads >= 4, made
    total = aot.compiled(kernel.sum_kernel, {**signature, "n": "i32"}, {"BLOCK": kernel.PROGRAMS}, target, **kernel.CONFIG)
    assert total.spills == 0, total
