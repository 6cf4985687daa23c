"""Compression: what is sent and what is lost, rounding by key, blocks that hold inf or NaN; its kernels compiled."""
import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fspeed as fs
from fspeed.ops import aot
from fspeed.ops.compress import cpu, dequantise, quantise, reference, sign_pack, sign_unpack
from fspeed.ops.interpret import interpreted
from fspeed.testing.ops import check_op
from tests.ops.rows_compress import ROWS

pytest.importorskip("triton")
from fspeed.ops.compress import kernel

KEY = torch.tensor([7, -9], dtype=torch.int32)
PATHS = (interpreted, contextlib.nullcontext)
SIZES = st.sampled_from([1, 7, 8, 64, 65, 1000, 1025, 4096, 4100])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def drawn(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1,), (17,), (63,), (130,), (1025,), (9, 7, 41)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_the_contract(name, shape):
    torch.manual_seed(len(shape))
    check_op(ROWS[name][0], *ROWS[name][1](shape))


@given(SIZES, DTYPES, st.sampled_from([8, 64, 1024]))
def test_signs_and_what_is_lost_are_all_there_was(n, dtype, block):
    x, error = drawn(n).to(dtype), drawn(n, 1)
    x[::5], error[::5] = 0, 0                                              # 0 counts as positive
    for within in PATHS:
        with within():
            bits, scales, lost = sign_pack(x, error, block=block)
            sent = sign_unpack(bits, scales, n, block=block)
        b = x.float() + error
        torch.testing.assert_close(sent + lost, b, rtol=0, atol=1e-6)
        assert torch.equal(bits, torch.from_numpy(np.packbits((b < 0).numpy(), bitorder="little")))
        size = torch.stack([part.square().mean().sqrt() for part in b.split(block)])
        torch.testing.assert_close(scales, size, rtol=1e-6, atol=1e-7)


@given(st.integers(1, 4), SIZES)
def test_of_many_ranks_the_mean_is_unpacked(ranks, n):
    sent = [sign_pack(drawn(n, seed), block=64) for seed in range(ranks)]
    want = torch.stack([sign_unpack(bits, scales, n, block=64) for bits, scales, _ in sent]).mean(0)
    for within in PATHS:
        with within():
            got = sign_unpack(torch.stack([s[0] for s in sent]), torch.stack([s[1] for s in sent]), n, block=64)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_fed_back_errors_lose_nothing_over_time():
    """The mean of what is sent comes to the mean of what was given, as 1 over the number of steps."""
    x, error, total = drawn(512), torch.zeros(512), torch.zeros(512)
    for step in range(1, 101):
        bits, scales, error = sign_pack(x, error)
        total += sign_unpack(bits, scales, 512)
        torch.testing.assert_close(total + error, step * x, rtol=0, atol=1e-4)


@given(SIZES, DTYPES, st.sampled_from([8, 4]), st.sampled_from([8, 64, 1024]), st.booleans())
def test_integers_are_near_and_alike_on_every_path(n, dtype, bits, block, by_key):
    x, named = 10 * drawn(n, n).to(dtype), dict(key=KEY, start=4 * n) if by_key else {}
    x[::7] = 0
    if n > block:
        x[:block] = 0
    found = []
    for within in PATHS:
        with within():
            codes, scales = quantise(x, bits=bits, block=block, **named)
            found += [(codes, scales, dequantise(codes, scales, n, bits=bits, block=block))]
    found += [(*reference.quantise(x, named.get("key"), named.get("start", 0), bits, block), found[0][2])]
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))
    scale = found[0][1].repeat_interleave(block)[:n]
    assert ((found[0][2] - x.float()).abs() <= scale * (1 if by_key else 0.5) * (1 + 1e-4)).all()


def test_long_ones_alike_in_parts():
    n = 2 * cpu.PART + 77
    x, error = drawn(n), drawn(n, 1)
    for got, want in ((cpu.quantise(x, KEY, 8, 4, 256), reference.quantise(x, KEY, 8, 4, 256)),
                      (cpu.sign_pack(x, error, 1024), reference.sign_pack(x, error, 1024))):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    with interpreted():
        assert torch.equal(quantise(x, bits=4, key=KEY, start=8)[0], cpu.quantise(x, KEY, 8, 4, 256)[0])


def test_rounding_by_key_keeps_the_mean_by_bits_of_fspeeds():
    n = 1 << 14
    x = torch.full((n,), 0.3)
    x[0] = 127.0
    codes, scales = quantise(x, key=KEY, block=8)
    rest = codes[8:].float() * scales.repeat_interleave(8)[8:]
    assert torch.allclose(rest, torch.tensor(0.3))                         # the largest of a block is exact
    x = x.view(-1, 8).clone()
    x[:, 0] = 127.0
    codes, _ = quantise(x, key=KEY, block=8)
    low = codes.view(-1, 8)[:, 1:].float()
    assert set(low.unique().tolist()) == {0.0, 1.0}
    assert abs(float(low.mean()) - 0.3) < 5 * (0.3 * 0.7 / low.numel()) ** 0.5                 # five standard deviations
    words = fs.random.bits(KEY, (n // 4,), torch.int64)                    # x0 << 32 | x1, of which each has two draws
    draws = torch.stack([words >> 32 & 0xFFFF, words >> 48 & 0xFFFF, words & 0xFFFF, words >> 16 & 0xFFFF], -1).view(-1, 8)
    assert torch.equal(low, (0.3 + draws[:, 1:] * 2.0**-16).floor())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_does_not_come_back_finite(bad):
    x = torch.ones(24)
    x[9] = bad
    for within in PATHS:
        for bits in (8, 4):
            with within():
                back = dequantise(*quantise(x, bits=bits, block=8), 24, bits=bits, block=8)
            assert not back[8:16].isfinite().any()
            assert torch.equal(back[:8], x[:8])
            assert torch.equal(back[16:], x[16:])


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="bits must be 8 or 4"):
        quantise(torch.ones(8), bits=2)
    with pytest.raises(ValueError, match="power of two"):
        sign_pack(torch.ones(8), block=100)
    with pytest.raises(ValueError, match="multiple of 4"):
        quantise(torch.ones(8), start=2)
    with pytest.raises(ValueError, match="shape"):
        sign_pack(torch.ones(8), torch.ones(7))


INTEGERS = {"n": "i64", "start": "i64", "bytes_": "i64", "blocks": "i64", "ranks": "i32"}
SIGNS = {"x": "*fp32", "error": "*fp32", "bits": "*u8", "scales": "*fp32", "lost": "*fp32", "out": "*fp32", "BLOCK": 1024}
CODES = {"x": "*fp32", "codes": "*i8", "scales": "*fp32", "out": "*fp32", "key": None, "BLOCK": 256}
CONFIGURATIONS = {
    "sign_pack": (SIGNS, 2), "sign_pack, bf16": (SIGNS | {"x": "*bf16"}, 2), "sign_unpack": (SIGNS, 0),
    "quantise 8": (CODES | {"MOST": 127}, 1), "quantise 8 by key, bf16": (CODES | {"MOST": 127, "x": "*bf16", "key": "*i32"}, 1),
    "quantise 4 by key": (CODES | {"MOST": 7, "key": "*i32"}, 1), "quantise 4, bf16": (CODES | {"MOST": 7, "x": "*bf16"}, 1),
    "dequantise 8": (CODES | {"MOST": 127}, 0), "dequantise 4": (CODES | {"MOST": 7, "codes": "*u8"}, 0),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_no_spills_and_wide_loads(configuration, target):
    given, wide = CONFIGURATIONS[configuration]
    made = getattr(kernel, configuration.partition(" ")[0].rstrip(",") + "_kernel")
    given = INTEGERS | given | {"ROWS": kernel.rows(target == "gfx942", given["BLOCK"])}
    types = {name: value for name, value in given.items() if isinstance(value, str)}
    constants = {name: value for name, value in given.items() if name in made.arg_names and name not in types}
    found = aot.compiled(made, types, constants, target, divisible=("n", "bytes_", "blocks"), **kernel.CONFIG)
    assert found.spills == 0, found
    assert found.wide_loads >= wide, found
