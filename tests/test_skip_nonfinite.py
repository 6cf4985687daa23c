"""A step whose gradients overflow anywhere changes nothing anywhere, and says so."""
import pytest
import torch
import torch.distributed as dist

import fspeed as fs
from fspeed import optim
from fspeed.testing import assert_equal, mesh, ranks
from fspeed.transforms._guard import ends

T = torch.tensor
INF, NAN = float("inf"), float("nan")


def toy(dtype=torch.float32):
    step = fs.step(lambda p, b, key: fs.mean((p["w"].float() * b).sum(-1)), optim.adamw(optim.linear_schedule(0.1, 0.0, 10)))
    return fs.skip_nonfinite(step), {"w": torch.ones(3, dtype=dtype), "empty": torch.zeros(0), "i": T(3)}


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_but_the_call_count_stays(bad, dtype):
    """Case 30: parameters, moments, and counts of updates and schedules."""
    step, params = toy(dtype)
    state, metrics = step(step.init(params), torch.ones(2, 3))
    assert metrics["skipped"] == 0
    after, metrics = step(state, T([[1.0, bad, 1.0], [1.0, 1.0, 1.0]]))
    assert metrics["skipped"] == 1 and after.step == 2
    assert_equal((after.params, after.opt_state), (state.params, state.opt_state), "a skipped step")


def test_overflow_on_one_rank_skips_on_all():
    def run(stage):
        step, params = toy()
        step = fs.zero_shard(step, mesh(data=2), stage=stage)
        state = step.init(params)
        batch = torch.ones(1, 3)
        batch[0, 1] = INF if dist.get_rank() else 1.0
        after, metrics = step(state, batch)
        assert_equal((after.params, after.opt_state), (state.params, state.opt_state), "a skipped step")
        return metrics["skipped"]

    for stage in (1, 2, 3):
        assert ranks(2)(run, stage) == [1, 1]


def test_under_torch_func_nothing_is_asked():
    """A lane that overflows is skipped, the others go on."""
    step, params = toy()
    state = step.init(params)
    one, two = torch.ones(2, 3), torch.full((2, 3), INF)
    new, metrics = torch.func.vmap(step, in_dims=(None, 0))(state, torch.stack([one, two]))
    assert metrics["skipped"].tolist() == [0, 1]
    moved = new.params["root"]["w"]
    torch.testing.assert_close(moved[0], step(state, one)[0].params["root"]["w"])
    assert torch.equal(moved[1], params["w"])


@pytest.mark.parametrize("x, finite", [
    ([1.0, 2.0], True), ([1.0, NAN, 2.0], False), ([INF], False), ([-INF, 1.0], False),
    ([1 + 2j], True), ([complex(1, NAN)], False), ([complex(INF, 1)], False),
])
def test_the_ends_say_whether_all_are_finite(x, finite):
    assert bool(ends(T(x)).isfinite().all()) is finite
