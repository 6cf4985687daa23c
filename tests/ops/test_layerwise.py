"""LAMB on flat buckets: against fspeed.optim's, by segment, in place, in parts, rounded by key; its kernels compiled."""
import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fspeed import optim
from fspeed.ops import aot
from fspeed.ops.interpret import interpreted
from fspeed.ops.layerwise import lamb, lamb_

pytest.importorskip("triton")
from fspeed.ops.layerwise import kernel
from fspeed.ops.optimizers.kernel import elements

KEY = torch.tensor([7, -9], dtype=torch.int32)
NUMBERS = dict(rate=0.1, power1=0.81, power2=0.99**2, b2=0.99, weight_decay=0.1, min_ratio=0.01, max_ratio=10.0)
PATHS = (interpreted, contextlib.nullcontext)


def drawn(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) for _ in range(3)] + [torch.rand(n, generator=g) + 0.1]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that segments begin in, end in and pass through."""
    monkeypatch.setattr(kernel, "block", lambda n: 64)
    monkeypatch.setattr(kernel, "grid", lambda n: (-(-n // 64),))


def test_each_segment_is_as_if_it_were_alone(small_blocks):
    @given(st.lists(st.sampled_from([0, 0, 1, 5, 63, 64, 65, 128, 200]), min_size=1, max_size=6), st.sampled_from([0, 7, 64, 130]))
    def holds(lengths, padding):
        ends = torch.tensor(lengths).cumsum(0)
        decays, n = torch.arange(len(lengths)) % 3 * 0.5, int(ends[-1]) + padding
        rows = drawn(n)
        if n == 0:
            return
        found = []
        for within in PATHS:
            with within():
                found.append(lamb(*rows, ends=ends, decays=decays, **NUMBERS))
        for got in found:
            for a, b, decay in zip([0, *ends[:-1].tolist()], [*ends[:-1].tolist(), n], decays, strict=True):
                alone = lamb(*[x[a:b] for x in rows], **NUMBERS | dict(weight_decay=0.1 * decay))
                for x, y in zip(got, alone, strict=True):
                    torch.testing.assert_close(x[a:b], y, rtol=2e-6, atol=2e-7)      # sums in another order

    holds()


def test_the_same_as_fspeeds():
    for debias in (False, True):
        opt = optim.lamb(0.1, b2=0.99, weight_decay=0.1, min_ratio=0.01, max_ratio=10.0, debias_rate=debias)
        tree = list(drawn(300)[0].split([200, 40, 60]))
        state, mine = opt.init(tree), [torch.cat(tree), torch.zeros(300), torch.zeros(300)]
        for t in (1, 2, 3):
            g = drawn(300, t)[1]
            updates, state = opt.update(list(g.split([200, 40, 60])), state, tree)
            tree = optim.apply_updates(tree, updates)
            powers = dict(power1=0.9**t, power2=0.99**t)
            if debias:
                powers = dict(power1=0, power2=0, rate=0.1 * (1 - 0.99**t) ** 0.5 / (1 - 0.9**t))
            mine = lamb(mine[0], g, *mine[1:], ends=torch.tensor([200, 240, 300]), **NUMBERS | powers)
            torch.testing.assert_close(mine[0], torch.cat(tree), rtol=2e-6, atol=2e-6)


def test_in_place_by_key_with_a_copy():
    for within in PATHS:
        p, g, mu, nu = drawn(200)
        p, copy, named = p.bfloat16(), torch.zeros(200, dtype=torch.float16), NUMBERS | dict(key=KEY, start=8)
        with within():
            want = lamb(p, g, mu, nu, **named)
            lamb_(p, g, mu, nu, copy=copy, **named)
        assert all(torch.equal(a, b) for a, b in zip((p, mu, nu), want, strict=True))
        assert torch.equal(copy, p.half())
        assert not torch.equal(p, lamb(*drawn(200), **NUMBERS)[0].bfloat16())


def test_parts_step_as_the_whole():
    """Two ranks, that cut a segment: sums of squares are added."""
    rows, ends = drawn(96), torch.tensor([20, 70, 96])
    cuts = [torch.tensor([20, 48, 48]), torch.tensor([0, 22, 48])]
    sums = []
    for part, mine in enumerate(cuts):
        lamb(*[x.split(48)[part] for x in rows], ends=mine, summed=lambda s: sums.append(s) or s, **NUMBERS)
    got = [lamb(*[x.split(48)[part] for x in rows], ends=mine, summed=lambda s: sums[0] + sums[1], **NUMBERS)[0]
           for part, mine in enumerate(cuts)]
    torch.testing.assert_close(torch.cat(got), lamb(*rows, ends=ends, **NUMBERS)[0], rtol=1e-6, atol=1e-7)


def test_zeros_stay_and_nan_is_seen():
    zero = torch.zeros(8)
    for within in PATHS:
        with within():
            assert torch.equal(lamb(zero, zero, zero, zero, **NUMBERS)[0], zero)
            ends = torch.tensor([4, 8])
            bad = lamb(torch.ones(8), torch.tensor([torch.nan] + 7 * [1.0]), zero, zero, ends=ends, **NUMBERS)[0]
            assert bad[:4].isnan().all()
            assert bad[4:].isfinite().all()


TYPES = {"ends": "*i64", "start": "i64", "n": "i64", "last": "i32", "size": "i32",
         **dict.fromkeys(("numbers", "decays", "starts", "heads", "sums"), "*fp32")}
CONFIGURATIONS = {
    "float32": {"copy": None, "key": None}, "gradients in bf16": {"g": "*bf16", "copy": None, "key": None},
    "bf16, by key": {"p": "*bf16", "to_p": "*bf16", "g": "*bf16", "key": "*i32", "copy": None},
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", ["moments", "step", "total"])
def test_no_spills_and_wide_loads(name, configuration, target):
    made = getattr(kernel, f"{name}_kernel")
    buckets = {x: "*fp32" for x in ("p", "g", "mu", "nu", "to_p", "to_mu", "to_nu")}
    given = buckets | TYPES | {k: v for k, v in CONFIGURATIONS[configuration].items() if v}
    constants = {"BLOCK": elements(target == "gfx942"), "MANY": 1024} | {
        k: v for k, v in CONFIGURATIONS[configuration].items() if not v}
    constants = {k: v for k, v in constants.items() if k in made.arg_names}
    found = aot.compiled(made, given, constants, target, divisible=("n",), **kernel.CONFIG)
    assert found.spills == 0, found
    if name != "total":
        assert found.wide_loads >= {"moments": 4, "step": 3}[name], found
