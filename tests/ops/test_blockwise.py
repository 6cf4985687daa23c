"""AdamW with moments of 8 bits: against AdamW, on both paths, in place, what its codes can hold; its kernel compiled."""
import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fspeed.ops import aot
from fspeed.ops.blockwise import Moments8bit, adamw8bit, adamw8bit_, moments8bit, reference
from fspeed.ops.interpret import interpreted
from fspeed.ops.optimizers import adamw

pytest.importorskip("triton")
from fspeed.ops.blockwise import kernel
from fspeed.ops.compress.kernel import CONFIG, rows

KEY = torch.tensor([7, -9], dtype=torch.int32)
NUMBERS = dict(rate=0.1, power1=0.81, power2=0.99**2, b2=0.99, weight_decay=0.1)
PATHS = (interpreted, contextlib.nullcontext)


def drawn(n, dtype=torch.float32):
    g = torch.Generator().manual_seed(n)
    moments = Moments8bit(
        torch.randint(-127, 128, (n,), generator=g).to(torch.int8), torch.randint(256, (n,), generator=g).to(torch.uint8),
        *torch.rand(2, -(-n // 256), generator=g).unbind())
    return torch.randn(n, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype), moments


def moments_of(moments):
    return reference.mean(moments.mu, moments.mu_scale), reference.square(moments.nu, moments.nu_scale)


@given(st.sampled_from([1, 17, 255, 256, 257, 3000]),
       st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans())
def test_a_step_is_adamws_and_moments_are_near(n, dtype, by_key, by_segment):
    p, g, moments = drawn(n, dtype)
    named = NUMBERS | (dict(key=KEY, start=4 * n) if by_key else {})
    named |= dict(ends=torch.tensor([n // 2, n]), decays=torch.tensor([0.0, 2.0])) if by_segment else {}
    want = adamw(p, g, *moments_of(moments), **named)
    found = []
    for within in PATHS:
        with within():
            found.append(adamw8bit(p, g, moments, **named))
        got, new = found[-1]
        torch.testing.assert_close(got, want[0], rtol=2 * torch.finfo(dtype).eps, atol=4e-7)    # a rounding to bfloat16 flips
        mu, nu = moments_of(new)
        # half a code off, of the root: for mu's 127 codes and nu's 255, of the fourth root
        roots = new.mu_scale.max().item() ** 0.5, new.nu_scale.max().item() ** 0.25
        torch.testing.assert_close(mu.abs().sqrt(), want[1].abs().sqrt(), rtol=0, atol=0.51 / 127 * roots[0])
        torch.testing.assert_close(nu**0.25, want[2] ** 0.25, rtol=0, atol=1.01 / 255 * roots[1])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-6, atol=1 if a.dtype != torch.float32 else 0)


def test_in_place_with_a_copy():
    for within in PATHS:
        p, g, moments = drawn(300)
        with within():
            want, new = adamw8bit(p, g, moments, **NUMBERS)
            copy = torch.zeros(300, dtype=torch.bfloat16)
            adamw8bit_(p, g, moments, copy=copy, **NUMBERS)
        assert all(torch.equal(a, b) for a, b in zip((p, *moments), (want, *new), strict=True))
        assert torch.equal(copy, p.bfloat16())


def test_small_second_moments_are_never_lost():
    """A gradient a thousandth of its block's largest, so a square of a millionth, moves as far as with exact moments, nearly."""
    g = torch.full((256,), 1e-3)
    g[0] = 1.0
    p, moments = torch.zeros(256), moments8bit(g)
    exact = p, torch.zeros(256), torch.zeros(256)
    for t in range(1, 20):
        powers = dict(rate=0.1, power1=0.9**t, power2=0.999**t)
        p, moments = adamw8bit(p, g, moments, **powers)
        exact = adamw(exact[0], g, *exact[1:], **powers)
    assert (moments.nu > 0).all()
    torch.testing.assert_close(p, exact[0], rtol=0.2, atol=0)


def test_it_trains_as_adamw_does():
    draw = torch.Generator().manual_seed(0)
    a, target = torch.randn(600, 400, generator=draw), torch.randn(600, generator=draw)
    loss = lambda p: ((a @ p - target) ** 2).mean()
    p, moments = torch.zeros(400), moments8bit(torch.zeros(400))
    exact = torch.zeros(400), torch.zeros(400), torch.zeros(400)
    start = float(loss(p))
    for t in range(1, 151):
        powers = dict(rate=0.01, power1=0.9**t, power2=0.999**t)
        p, moments = adamw8bit(p, torch.func.grad(loss)(p), moments, **powers)
        exact = adamw(exact[0], torch.func.grad(loss)(exact[0]), *exact[1:], **powers)
    assert abs(float(loss(p)) - float(loss(exact[0]))) < 0.02 * (start - float(loss(exact[0])))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen(bad):
    p, g, moments = drawn(512)
    g[5] = bad
    for within in PATHS:
        with within():
            got, new = adamw8bit(p, g, moments, **NUMBERS)
            assert not got[5].isfinite()
            assert new.mu_scale.isinf().tolist() == [True, False]
            assert not adamw8bit(got, drawn(512)[1], new, **NUMBERS)[0][:256].isfinite().any()
            assert got[256:].isfinite().all()


CONFIGURATIONS = {
    "float32": {}, "gradients in bf16": {"g": "*bf16"}, "copy in bf16": {"copy": "*bf16"},
    "bf16, by key": {"p": "*bf16", "to_p": "*bf16", "g": "*bf16", "key": "*i32"},
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_no_spills_and_wide_loads(configuration, target):
    types = {
        **dict.fromkeys(("p", "g", "to_p", "mu_scale", "nu_scale", "to_mu_scale", "to_nu_scale", "numbers", "decays"), "*fp32"),
        **dict.fromkeys(("mu", "to_mu"), "*i8"), **dict.fromkeys(("nu", "to_nu"), "*u8"),
        "ends": "*i64", "start": "i64", "n": "i64", "last": "i32", **CONFIGURATIONS[configuration]}
    constants = {"BLOCK": reference.BLOCK, "ROWS": rows(target == "gfx942", reference.BLOCK)}
    constants |= {name: None for name in ("copy", "key") if name not in types}
    found = aot.compiled(kernel.adamw8bit_kernel, types, constants, target, divisible=("n",), **CONFIG)
    assert found.spills == 0, found
    assert found.wide_loads >= 4, found
