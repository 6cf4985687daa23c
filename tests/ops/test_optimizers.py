"""Optimizers on flat buckets: kernels against references and against fspeed.optim, in place, by segment, rounded by key."""
import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fspeed import optim
from fspeed.ops import optimizers
from fspeed.ops.interpret import interpreted
from fspeed.ops.optimizers import reference
from fspeed.testing.ops import check_op
from tests.ops.rows_optimizers import ROWS

pytest.importorskip("triton")
KEY = torch.tensor([7, -9], dtype=torch.int32)


def drawn(n, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g).to(dtype) for _ in range(3)] + [torch.rand(n, generator=g) + 0.1]


def run(name, rows, **given):
    """In the functional form, and in place: new tensors."""
    numbers = {"adamw": dict(rate=0.1, power1=0.81, power2=0.99**2, b2=0.99, weight_decay=0.1),
               "lion": dict(rate=0.1, weight_decay=0.1), "sgd_momentum": dict(rate=0.1, nesterov=True)}[name] | given
    rows = rows[: {"adamw": 4, "lion": 3, "sgd_momentum": 3}[name]]
    made = getattr(optimizers, name)(*rows, **numbers)
    mine = [x.clone() for x in rows]
    getattr(optimizers, f"{name}_")(*mine, **numbers)
    for a, b in zip(made, (mine[0], *mine[2:]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(mine[1], rows[1])
    return made


@pytest.mark.parametrize("shape", [(1,), (17,), (63,), (130,), (1025,), (9, 7, 41)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_the_contract(name, shape):
    torch.manual_seed(len(shape))
    check_op(ROWS[name][0], *ROWS[name][1](shape))


@given(st.sampled_from(["adamw", "lion", "sgd_momentum"]), st.integers(1, 300),
       st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_a_kernel_gives_its_references_numbers(name, n, dtype, by_key):
    rows = drawn(n, n, dtype)
    named = dict(key=KEY, start=4 * n) if by_key else {}
    expected = run(name, rows, **named)
    with interpreted():
        got = run(name, rows, **named)
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(got[0], expected[0], rtol=torch.finfo(dtype).eps, atol=2e-7)     # torch's root is off by a rounding


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 20))
def test_segments_have_decays_of_their_own(lengths, padding):
    """Each segment is as if it were alone; what is behind the last one goes with it."""
    ends, decays = torch.tensor(lengths).cumsum(0), torch.arange(len(lengths)) % 3 * 0.5
    n = int(ends[-1]) + padding
    rows = drawn(n)
    if n == 0:
        return
    for within in (interpreted, contextlib.nullcontext):
        with within():
            got, *_ = run("adamw", rows, ends=ends, decays=decays)
        starts = [0, *ends[:-1].tolist()]
        for a, b, decay in zip(starts, [*ends[:-1].tolist(), n], decays, strict=True):
            alone, *_ = run("adamw", [x[a:b] for x in rows], weight_decay=0.1 * decay)
            torch.testing.assert_close(got[a:b], alone, rtol=1e-6, atol=1e-7)


def test_the_same_as_fspeeds():
    opts = {
        "adamw": optim.adamw(0.1, b2=0.99, weight_decay=0.1), "lion": optim.lion(0.1, weight_decay=0.1),
        "sgd_momentum": optim.sgd(0.1, 0.9, nesterov=True),
    }
    for name, opt in opts.items():
        p, state = drawn(200)[0], opt.init(drawn(200)[0])
        mine = [p, *[torch.zeros(200)] * (2 if name == "adamw" else 1)]
        for t in (1, 2, 3):
            g = drawn(200, t)[1]
            updates, state = opt.update(g, state, p)
            p = optim.apply_updates(p, updates)
            powers = dict(power1=0.9**t, power2=0.99**t) if name == "adamw" else {}
            mine = run(name, [mine[0], g, *mine[1:]], **powers)
            torch.testing.assert_close(mine[0], p, rtol=2e-6, atol=2e-6)         # a few roundings of either


def test_rounding_by_key_keeps_the_mean_and_depends_on_position_alone():
    x = torch.full((1 << 16,), 1 + 2**-10)                  # an eighth of the way to the next bfloat16 number
    rounded = reference.round_by_key(x, KEY, 0).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float(rounded.mean()) - float(x[0])) < 5 * 2**-7 * (1 / 8 * 7 / 8 / 2**16) ** 0.5    # five standard deviations
    assert torch.equal(reference.round_by_key(x[64:], KEY, 64).float(), rounded[64:])
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -1.0])
    assert torch.equal(reference.round_by_key(special, KEY, 0).float(), special)
    assert reference.round_by_key(torch.tensor([torch.nan]), KEY, 0).isnan().all()


def test_a_copy_in_bf16_is_written_beside():
    for within in (interpreted, contextlib.nullcontext):
        p, g, mu, _ = drawn(50)
        copy = torch.zeros(50, dtype=torch.bfloat16)
        with within():
            optimizers.lion_(p, g, mu, rate=0.1, copy=copy)
        assert torch.equal(copy, p.to(torch.bfloat16))


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="multiple of 4"):
        run("lion", drawn(8), start=2)
    with pytest.raises(ValueError, match="contiguous"):
        optimizers.lion_(torch.ones(4, 4).T, torch.ones(4, 4), torch.ones(4, 4), rate=0.1)
    with pytest.raises(ValueError, match="ends"):
        optimizers.lion_(*drawn(8)[:3], rate=0.1, decays=torch.ones(2))
