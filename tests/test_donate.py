"""A donated state's memory is used again, once; without donation nothing that was passed in changes."""
import pytest
import torch

import fspeed as fs
from fspeed import optim, random
from fspeed.shard.piece import only_live
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import assert_equal, mesh, problem, ranks

T = torch.tensor


def step_of(optimizer=None, donated=True):
    p = problem()
    step = fs.step(p.loss, optimizer or optim.adamw(1e-2), layers=p.layers, trainable=p.trainable)
    return p, fs.donate(step) if donated else step


def addresses(tree):
    return [x.data_ptr() for x in tree_leaves(tree) if x.numel() and x.dim()]


def test_parameters_and_moments_stay_where_they_were():
    p, step = step_of()
    state = step.init(p.params)
    before = addresses((state.params, state.opt_state))
    after, _ = step(state, p.batch(0, 3))
    assert addresses((after.params, after.opt_state)) == before
    _, pure = step_of(donated=False)
    state = pure.init(p.params)
    after, _ = pure(state, p.batch(0, 3))
    assert not set(addresses(only_live(after.params))) & set(addresses(only_live(state.params)))


@pytest.mark.parametrize("optimizer", [optim.adamw(1e-2), optim.lion(1e-3), optim.sgd(0.1)])
def test_a_donated_run_is_the_pure_run(optimizer):
    found = []
    for donated in (True, False):
        p, step = step_of(optimizer, donated)
        state = step.init(p.params, random.key(1))
        for i in range(3):
            state, _ = step(state, p.batch(i, 3))
        found.append(state)
    assert_equal(*found, "donation")


@pytest.mark.parametrize("wrap", [lambda s: s, fs.donate, fs.skip_nonfinite, lambda s: fs.accumulate(s, 2), fs.checkpoint])
def test_a_state_is_used_once(wrap):
    p, step = step_of()
    step = wrap(step)
    state = step.init(p.params)
    new, _ = step(state, p.batch(0, 3))
    for used in (state, state._replace(step=state.step + 1)):
        with pytest.raises(RuntimeError, match="donated"):
            step(used, p.batch(0, 3))
    step(new, p.batch(0, 3))


def test_a_skipped_step_gives_its_state_on():
    step = fs.donate(fs.skip_nonfinite(fs.step(lambda p, b, key: fs.mean(p["w"] * b), optim.adam(0.1))))
    state = step.init({"w": T([1.0, 2.0])})
    state, metrics = step(state, T([[float("inf"), 1.0]]))
    assert metrics["skipped"] == 1
    state, metrics = step(state, T([[1.0, 1.0]]))
    assert metrics["skipped"] == 0 and state.opt_state[0].count == 1


def test_the_callers_parameters_stay():
    p, step = step_of()
    before = tree_map(torch.clone, p.params)
    state = step.init(p.params)
    for i in range(2):
        state, _ = step(state, p.batch(i, 3))
    assert_equal(p.params, before, "the parameters given to init")


def test_sharded_states_are_donated_too():
    def run():
        p, _ = step_of()
        step = fs.donate(fs.zero_shard(fs.step(p.loss, optim.adamw(1e-2), layers=p.layers, trainable=p.trainable), mesh(data=2)))
        state = step.init(p.params)
        before = addresses((state.params, state.opt_state))
        after, _ = step(state, p.batch(0, 3))
        return addresses((after.params, after.opt_state)) == before

    assert ranks(2)(run) == [True, True]
