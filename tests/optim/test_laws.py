"""Laws of every optimizer in the table, without other libraries."""
import copy
import json
import math
from pathlib import Path

import pytest
import torch
from optimizer_table import TABLE, drawn, trained

from fspeed import optim
from fspeed.shard.piece import only_live, shard
from fspeed.shard.pytree import tree_leaves, tree_map, tree_structure
from fspeed.testing import assert_close, assert_equal, mesh, ranks
from fspeed.tree import chooser, cut, whole

ONE_PASS = [name for name in TABLE if TABLE[name](optim).apply]
VECTORS = Path(__file__).with_name("optax_vectors.json")
every_row = pytest.mark.parametrize("name", TABLE)


def steps(n, dtype=torch.float32, scale=1.0):
    return [drawn(100 + i, dtype, scale) for i in range(n)]


def copied(tree):
    return tree_map(torch.clone, tree)


@every_row
def test_ten_steps_end_where_optaxs_did(name):
    """Stored from optax 0.2.8 in float64, for where it is not installed."""
    expected = json.loads(VECTORS.read_text())[name]
    params, _ = trained(TABLE[name](optim), drawn(0, torch.float64), steps(10, torch.float64))
    got = torch.cat([x.reshape(-1) for x in tree_leaves(params)])
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@every_row
def test_update_is_pure_and_its_state_stable(name):
    opt = TABLE[name](optim)
    params, grads = drawn(0), drawn(1)
    state = trained(opt, params, steps(1))[1]
    before = copy.deepcopy((grads, state, params))
    first, second = opt.update(grads, state, params), opt.update(grads, state, params)
    assert_equal((grads, state, params), before, name)
    assert_equal(first, second, name)
    assert tree_structure(first[1]) == tree_structure(state)
    for new, old in zip(tree_leaves(first), tree_leaves((grads, state)), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_is_update_and_adding_and_only_reads_gradients(name):
    opt = TABLE[name](optim)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 2e-14), (torch.bfloat16, 2e-2)):    # a few roundings
        params, state = drawn(0, dtype), None
        expected, expected_state = trained(opt, params, steps(10, dtype))
        mine, state = copied(params), opt.init(params)
        for g in steps(10, dtype):
            before = copied(g)
            mine, state = opt.apply(g, state, mine)
            assert_equal(g, before, name)
        assert_close((mine, state), (expected, expected_state), tolerance, f"{name} {dtype}")


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_writes_over_what_it_is_given(name):
    opt = TABLE[name](optim)
    params = drawn(0)
    state = opt.init(params)
    new = opt.apply(drawn(1), state, params)
    new = new[0] if name == "named_chain" else new      # of a chain, the last link's
    owned = {x.data_ptr() for x in tree_leaves((params, state)) if x.dim()}
    assert all(x.data_ptr() in owned for x in tree_leaves(new) if x.dim())


@every_row
def test_zero_gradients_leave_everything_finite(name):
    params, state = trained(TABLE[name](optim), drawn(0), [tree_map(torch.zeros_like, drawn(1))] * 3)
    assert all(x.isfinite().all() for x in tree_leaves((params, state)))


@every_row
def test_leaves_are_bf16_and_stay_so(name):
    opt = TABLE[name](optim)
    params, state = trained(opt, drawn(0, torch.bfloat16), steps(3, torch.bfloat16))
    assert {x.dtype for x in tree_leaves(params)} == {torch.bfloat16}
    dtypes = lambda s: [x.dtype for x in tree_leaves(s)]
    assert dtypes(state) == dtypes(opt.init(drawn(0, torch.bfloat16)))
    assert all(x.isfinite().all() for x in tree_leaves(params))


# ---------------------------------------------------------------- placements
def stored(tree, grid, axes):
    """A tree as a step stores it: layers, a frozen leaf, flat shards over some axes of a mesh."""
    over = lambda axis: lambda name, group: shard(group, axis)
    place = tuple((name, over(grid.axis(name))) for name in axes)
    return only_live(cut(tree, chooser("layers/*"), lambda path: path != "s", place, grid.axes))


def stored_steps(name, sizes, axes, n=3):
    """Whole parameters and state after n steps on this rank's part."""
    grid, opt = mesh(**sizes), TABLE[name](optim)
    params, *grads = (stored(tree, grid, axes) for tree in (drawn(0), *steps(n)))
    state = opt.init(params)
    for g in grads:
        if opt.apply:
            params, state = opt.apply(g, state, params)
        else:
            params, state = trained(opt, params, [g], state)
    return whole((params, state))


def expected_steps(name, n=3):
    """The same on a plain tree in which frozen leaves are None."""
    frozen = lambda tree: {**tree, "s": None}
    opt = TABLE[name](optim)
    return trained(opt, frozen(drawn(0)), [frozen(g) for g in steps(n)])


PLACES = [
    ({"data": 3}, ("data",)), ({"data": 2}, ()),
    ({"replica": 2, "data": 2}, ("data",)), ({"inner": 2, "outer": 2}, ("inner", "outer")),
]


@pytest.mark.parametrize("sizes, axes", PLACES, ids=str)
@every_row
def test_sharded_is_whole(name, sizes, axes):
    """Cases 17, 19, 25, 26: uneven, empty, 0-d and frozen leaves; replicated ones count once."""
    expected, expected_state = expected_steps(name)
    for rank, (params, state) in enumerate(ranks(math.prod(sizes.values()))(stored_steps, name, sizes, axes)):
        assert_close(params, expected, 1e-5, f"{name} rank {rank}")
        assert_close(state, expected_state, 1e-5, f"{name} rank {rank}")
