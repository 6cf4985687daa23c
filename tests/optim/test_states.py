"""States: hyperparameters in them, skipped updates, errors."""
import math

import pytest
import torch
import torch.distributed as dist
from optimizer_table import drawn

from fspeed import optim
from fspeed.shard.piece import only_live, shard
from fspeed.shard.pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from fspeed.testing import assert_close, assert_equal, mesh, ranks
from fspeed.tree import cut, whole

NAN = torch.tensor([1.0, math.nan])


def run(opt, params, state, steps, one_pass):
    for i in steps:
        if one_pass:
            params, state = opt.apply(drawn(i), state, params)
        else:
            updates, state = opt.update(drawn(i), state, params)
            params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("make", [
    lambda: optim.adamw(optim.linear_schedule(0.1, 0.0, 10)),
    lambda: optim.sgd(optim.linear_schedule(0.1, 0.0, 10), 0.9),
    lambda: optim.inject_hyperparams(optim.adam)(optim.linear_schedule(0.1, 0.0, 10)),
])
def test_cases_33_and_47_ten_steps_are_five_and_after_a_reload_five(make, one_pass):
    copied = lambda tree: tree_map(torch.clone, tree)
    opt, params = make(), drawn(0)
    expected = run(opt, copied(params), opt.init(params), range(1, 11), one_pass)
    half = run(opt, copied(params), opt.init(params), range(1, 6), one_pass)
    leaves = [torch.from_numpy(x.numpy().copy()) for x in tree_leaves(half)]
    reloaded = tree_unflatten(tree_structure((params, make().init(params))), leaves)
    assert_equal(run(make(), *reloaded, range(6, 11), one_pass), expected, "after a reload")


def test_hyperparameters_are_read_set_and_scheduled():
    opt = optim.inject_hyperparams(optim.sgd)(optim.linear_schedule(1.0, 0.0, 4), momentum=0.5)
    p = torch.tensor(0.0)
    for one_pass in (False, True):
        state, rates = opt.init(p), []
        assert state.hyperparams["momentum"] == 0.5
        for _ in range(3):
            state = opt.apply(p + 1, state, p.clone())[1] if one_pass else opt.update(p + 1, state, p)[1]
            rates.append(float(state.hyperparams["learning_rate"]))
        assert rates == [1.0, 0.75, 0.5]
        state.hyperparams["momentum"] = torch.tensor(0.0)
        state = opt.apply(p + 1, state, p.clone())[1] if one_pass else opt.update(p + 1, state, p)[1]
        assert state.inner_state[0].trace == 1


def test_hyperparameters_that_are_no_numbers_stay_outside():
    opt = optim.inject_hyperparams(optim.adamw, static_args="b1")(0.1, mask={"a": True}, b1=0.5)
    assert set(opt.init({"a": NAN}).hyperparams) == {"learning_rate", "b2", "eps", "eps_root", "weight_decay"}
    with pytest.raises(ValueError, match=r"static_args \['beta'\]"):
        optim.inject_hyperparams(optim.adam, static_args="beta")


def test_a_scheduled_momentum():
    opt = optim.inject_hyperparams(optim.sgd)(1.0, momentum=optim.one_cycle_momentum(0.5, 1.0, 2, 2))
    state, p = opt.init(torch.tensor(0.0)), torch.tensor(0.0)
    traces = []
    for _ in range(3):
        _, state = opt.update(torch.tensor(1.0), state, p)
        traces.append(float(state.inner_state[0].trace))
    assert traces == [1.0, 1.5, 1 + 0.75 * 1.5]


# ---------------------------------------------------------------- what is not finite
def test_updates_that_are_not_finite_are_skipped_until_there_are_too_many():
    opt = optim.apply_if_finite(optim.adam(0.1), 2)
    good, bad = torch.ones(2), NAN
    state, p = opt.init(good), torch.zeros(2)
    seen = []
    for g in (good, bad, bad, good, bad, bad, bad):
        before = state
        updates, state = opt.update(g, state, p)
        seen.append((*map(int, state[:3]), int(state.inner_state[0].count)))
        if g is bad and state.notfinite_count <= 2:
            assert torch.equal(updates, torch.zeros(2))
            assert_equal(state.inner_state, before.inner_state, "the state")
    assert seen == [(0, 1, 0, 1), (1, 0, 1, 1), (2, 0, 2, 1), (0, 1, 2, 2), (1, 0, 3, 2), (2, 0, 4, 2), (3, 0, 5, 3)]
    assert updates[1].isnan()


def infinite_on_rank_0():
    axis = mesh(data=2).axis("data")
    params = only_live(cut({"w": torch.ones(40)}, place=(("flat", lambda n, g: shard(g, axis)),), axes=(axis,)))
    grads = tree_map(lambda p: torch.full_like(p, math.inf if dist.get_rank() == 0 else 1.0), params)
    opt = optim.apply_if_finite(optim.adam(0.1), 5)
    updates, state = opt.update(grads, opt.init(params), params)
    return whole(updates), state.notfinite_count, state.inner_state[0].count


def test_case_28_what_is_infinite_on_one_rank_is_skipped_on_all():
    for updates, bad, count in ranks(2)(infinite_on_rank_0):
        assert torch.equal(updates["w"], torch.zeros(40)) and bad == 1 and count == 0


# ---------------------------------------------------------------- parts of trees
def test_a_mask_may_be_a_prefix_a_tree_or_a_function():
    updates = {"a": {"x": torch.ones(1), "y": torch.ones(1)}, "b": torch.ones(1)}
    expected = {"a": {"x": torch.full((1,), 2.0), "y": torch.full((1,), 2.0)}, "b": torch.ones(1)}
    masks = ({"a": True, "b": False}, {"a": {"x": True, "y": True}, "b": False}, lambda p: {"a": True, "b": len(p) > 2})
    for mask in masks:
        opt = optim.masked(optim.scale(2.0), mask)
        assert_equal(opt.update(updates, opt.init(updates))[0], expected, "the updates")


def test_frozen_leaves_are_none_everywhere():
    params = {"a": torch.ones(2, 3), "b": None, "c": torch.ones(3)}
    mask, labels = {"a": True, "b": True, "c": False}, {"a": "x", "b": "y", "c": "y"}
    opts = [
        optim.adamw(0.1, mask=mask), optim.masked(optim.adam(0.1), mask), optim.lamb(0.1, mask=mask), optim.muon(0.1),
        optim.partition({"x": optim.sgd(0.1), "y": optim.adam(0.1)}, labels), optim.adafactor(0.1, 2),
        optim.chain(optim.adaptive_grad_clip(0.1), optim.lion(0.1)),
    ]
    for opt in opts:
        state = opt.init(params)
        updates, state = opt.update(params, state, params)
        assert updates["b"] is None and updates["a"].shape == (2, 3)


@pytest.mark.parametrize("act, message", [
    (lambda p: optim.chain(optim.scale(1.0)).update(p, ()), "a state of 0 parts was given to a chain of 1"),
    (lambda p: optim.named_chain(("a", optim.scale(1.0)), ("a", optim.scale(1.0))), "each name may be given once"),
    (lambda p: optim.partition({"a": optim.scale(1.0)}, {"w": "b"}).init(p), "no transformation is labelled"),
    (lambda p: optim.add_decayed_weights(0.1).update(p, optim.EmptyState()), "needs params"),
    (lambda p: optim.scale_by_trust_ratio().update(p, optim.EmptyState()), "needs params"),
    (lambda p: optim.scale_by_lion(mode="soft"), "mode must be one of"),
    (lambda p: optim.scale_by_muon(preconditioning="none"), "preconditioning must be one of"),
    (lambda p: optim.scale_by_muon((1.0, 2.0)), "ns_coeffs must be 3"),
    (lambda p: optim.muon(0.1, "fast"), "ns_coeffs must be one of"),
])
def test_what_is_wrong_raises_with_what_was_expected(act, message):
    with pytest.raises(ValueError, match=message):
        act({"w": torch.ones(2)})


def test_averages_of_tensors():
    new, old = {"a": torch.tensor(2.0)}, {"a": torch.tensor(0.0)}
    assert optim.incremental_update(new, old, 0.25)["a"] == 0.5
    assert [float(optim.periodic_update(new, old, i, 3)["a"]) for i in range(4)] == [2, 0, 0, 2]
    assert_close(optim.apply_updates({"a": torch.ones(2, dtype=torch.bfloat16)}, {"a": torch.ones(2)})["a"], torch.full(
        (2,), 2.0, dtype=torch.bfloat16), 0.0, "a")
