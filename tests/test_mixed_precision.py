"""Short floats: what is computed, kept, sent and summed in which dtype; and how the loss scale moves."""
import pytest
import torch
import torch.distributed as dist

import fspeed as fs
from fspeed import optim
from fspeed.shard.pytree import tree_leaves
from fspeed.testing import assert_equal, mesh, ranks
from fspeed.testing.count import Counted

T = torch.tensor
INF = float("inf")


def scales(oks, initial=8.0, **kwargs):
    """The scale in force at each step, then the one after it."""
    scaling = fs.LossScaling(initial=initial, **{"window": 4, "hysteresis": 2, **kwargs})
    s, found = scaling.start(), []
    for ok in oks:
        found.append(float(s.scale))
        s = scaling.next(s, T(ok))
    return [*found, float(s.scale)]


TABLE = {
    "ten good": ([True] * 10, {}, [8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32]),
    "bad, bad, good x6": ([False, False] + [True] * 6, {}, [8, 8, 4, 4, 4, 4, 8, 8, 8]),
    "bad, good, bad": ([False, True, False], {}, [8, 8, 8, 4]),
    "bad, good, bad, consecutive": ([False, True, False], {"consecutive_hysteresis": True}, [8, 8, 8, 8]),
    "the counter refills when the scale grows": ([False] + [True] * 4 + [False, False], {}, [8, 8, 8, 8, 8, 16, 16, 8]),
    "an overflow starts the window again": ([True] * 3 + [False] + [True] * 4, {}, [8, 8, 8, 8, 8, 8, 8, 8, 16]),
    "after the first cut each overflow cuts": ([False] * 5, {}, [8, 8, 4, 2, 1, 1]),
    "the floor": ([False] * 4, {"initial": 4.0, "floor": 2.0, "hysteresis": 1}, [4, 2, 2, 2, 2]),
    "another factor": ([True, True, False], {"window": 2, "factor": 4.0, "hysteresis": 1}, [8, 8, 32, 8]),
    "hysteresis 1": ([False, True, False], {"hysteresis": 1}, [8, 4, 4, 2]),
}


@pytest.mark.parametrize("name", TABLE)
def test_how_the_loss_scale_moves(name):
    oks, options, expected = TABLE[name]
    assert scales(oks, **{"initial": 8.0, **options}) == expected


def fp16(**scaling):
    loss = lambda p, b, key: fs.mean((2 * p["w"] * b).sum(-1))
    step = fs.step(loss, optim.adamw(optim.linear_schedule(0.1, 0.0, 100)))
    return fs.mixed_precision(step, torch.float16, loss_scaling=fs.LossScaling(**{"initial": 2.0, "hysteresis": 1, **scaling}))


GOOD, BAD = torch.ones(2, 3), torch.full((2, 3), 6e4)


def test_a_step_moves_the_scale_as_the_table_says():
    """4 calls, overflow in the 2nd: case 29, schedules and moments count 3."""
    step = fp16(window=2)
    state = step.init({"w": torch.ones(3)})
    seen = []
    for batch in (GOOD, BAD, GOOD, GOOD):
        state, metrics = step(state, batch)
        seen.append((float(metrics["skipped"]), float(metrics["loss_scale"])))
    assert seen == [(0, 2), (1, 1), (0, 1), (0, 2)]
    counts = [int(x) for x in tree_leaves(state.opt_state) if x.dtype == torch.int32]
    assert state.step == 4 and set(counts) == {3}


def test_overflow_at_the_floor_raises_after_patience():
    step = fp16(patience=2, floor=1.0)
    state = step.init({"w": torch.ones(3)})
    for _ in range(3):
        state, metrics = step(state, BAD)
    assert metrics["loss_scale"] == 1
    with pytest.raises(FloatingPointError, match=r"2 steps in a row .* floor, 1\.0"):
        step(state, BAD)
    step(state, GOOD)


@pytest.mark.parametrize("placement", ["data_parallel", "zero1", "zero2", "zero3"])
def test_overflow_on_one_rank_skips_on_all(placement):
    """Cases 28 and 30."""
    def run():
        from fspeed.testing.stacks import stacked

        step = stacked(fp16(), (placement,), mesh(data=2))
        state = step.init({"w": torch.ones(3)})
        state, _ = step(state, GOOD)
        after, metrics = step(state, BAD if dist.get_rank() == 0 else GOOD)
        assert_equal((after.params, after.opt_state), (state.params, state.opt_state), "a skipped step")
        return metrics["skipped"], metrics["loss_scale"]

    assert ranks(2)(run) == [(1, 1), (1, 1)]


# ---------------------------------------------------------------- dtypes
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_what_the_loss_sees_and_what_is_kept(compute):
    seen = {}
    layer = fs.layer(lambda p, x: seen.update(layer=p["w"].dtype, x=x.dtype) or x * p["w"])

    def loss(p, batch, key):
        seen.update(root=p["r"].dtype, i=p["i"].dtype, c=p["c"].dtype, frozen=p["frozen"].dtype, batch=[x.dtype for x in batch])
        return fs.mean(layer(p["l"], batch[0]) * p["r"])

    params = {
        "l": {"w": torch.ones(3)}, "r": T(2.0, dtype=torch.float64), "i": T(3), "c": T(1j), "frozen": T(1.0),
        "half": T(1.0, dtype=torch.bfloat16),
    }
    step = fs.step(loss, optim.adam(0.1), layers="l", trainable=lambda path: path != "frozen")
    step = fs.mixed_precision(step, compute)
    state = step.init(params)
    batch = torch.ones(2, 3), torch.arange(2), torch.ones(2, dtype=torch.bool)
    _, grads = step.value_and_grad(state, batch)
    state, _ = step(state, batch)
    assert seen["layer"] == seen["x"] == seen["root"] == compute and seen["i"] == torch.int64 and seen["c"] == torch.complex64
    assert seen["batch"] == [compute, torch.int64, torch.bool]
    root = step.params(state)
    kept = {"r": torch.float64, "half": torch.float32, "i": torch.int64, "c": torch.complex64, "frozen": torch.float32}
    assert {k: root[k].dtype for k in kept} == kept and root["l"]["w"].dtype == torch.float32
    assert {g.dtype for g in tree_leaves(grads)} == {torch.float32, torch.float64, torch.complex64}


def gathered_dtypes(outside):
    """What travels in a step: dtypes of gathers and of reductions."""
    seen = set()

    class Dtypes(Counted):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "_c10d_functional" and func._opname != "wait_tensor" and args[0].numel() >= 32:
                seen.add((func._opname, args[0].dtype))
            return super().__torch_dispatch__(func, types, args, kwargs)

    m = mesh(data=2)
    step = fs.step(lambda p, b, key: fs.mean(p["w"] * b), optim.sgd(1.0))
    low = lambda s: fs.mixed_precision(s, torch.bfloat16, reduce=torch.bfloat16 if outside == "reduce" else torch.float32)
    sharded = lambda s: fs.zero_shard(s, m, stage=3)
    step = low(sharded(step)) if outside else sharded(low(step))
    state = step.init({"w": torch.ones(64)})
    with Dtypes(2):
        step(state, torch.ones(1, 64))
    return seen


@pytest.mark.parametrize("outside, gathers, reduces", [
    (True, torch.bfloat16, torch.float32), (False, torch.float32, torch.float32), ("reduce", torch.bfloat16, torch.bfloat16),
])
def test_order_says_what_is_gathered_and_reduce_says_what_is_summed(outside, gathers, reduces):
    for seen in ranks(2)(gathered_dtypes, outside):
        assert seen == {("all_gather_into_tensor", gathers), ("all_to_all_single", reduces)}


@pytest.mark.parametrize("args", [{"compute": "bf16"}, {"compute": torch.int8}, {"reduce": torch.int32}])
def test_what_is_no_floating_dtype_is_refused(args):
    with pytest.raises(TypeError, match="must be a floating torch"):
        fs.mixed_precision(fs.step(lambda p, b, key: fs.mean(p), optim.sgd(1.0)), **args)


def test_one_precision_in_another():
    step = fs.mixed_precision(fp16())
    state = step.init({"w": torch.ones(3)})
    state, metrics = step(state, GOOD)
    assert metrics["skipped"] == 0 and metrics["loss_scale"] == 2
    torch.testing.assert_close(step.params(state)["w"], torch.full((3,), 0.9), rtol=1e-4, atol=1e-4)
