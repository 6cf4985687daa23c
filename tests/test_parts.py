"""Which elements of which leaf are where, and groups without some leaves, against plain computations on whole groups."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fspeed.shard.parts import Kept, Lying, located, without
from fspeed.shard.piece import Frozen, Piece, Tied, is_gone, live, only_live, shard
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fspeed.testing import mesh, ranks
from fspeed.tree import gathered

PLACES = [{}, {"data": 1}, {"data": 2}, {"data": 3}, {"a": 2, "b": 2}]
KINDS = st.sampled_from(["live", "live", "live", "frozen", "tied", "double", "none"])
groups = st.lists(st.tuples(st.integers(0, 40), KINDS), min_size=1, max_size=7)


def made(rows):
    """A group of numbered elements: leaf i has i, i + 1/64, ...; with frozen and tied leaves, two dtypes and nothing at all."""
    out = []
    for i, (n, kind) in enumerate(rows):
        x = i + torch.arange(n) / 64
        out.append({"live": x, "frozen": Frozen(x), "tied": Tied(0), "double": x.double(), "none": None}[kind])
    return out


def stored(group, sizes):
    grid = mesh(**sizes) if sizes else None
    for name in sizes:
        group = shard(group, grid.axis(name))
    return only_live(group)


def found(rows, sizes):
    """The live buffers, and what `located` says is in them."""
    part = stored(made(rows), sizes)
    buffers = tree_leaves(part)
    seen = [torch.full(x.shape, -1.0, dtype=torch.float64) for x in buffers]
    whole = located(part)
    parts = set()
    for i, lying in enumerate(whole):
        if isinstance(lying, Lying):
            parts.add(lying.parts)
            for buffer, start, first, stop in lying.runs:
                assert first < stop or not rows[i][0]
                seen[buffer].reshape(-1)[start : start + stop - first] = i + torch.arange(first, stop) / 64
    return buffers, seen, [type(x) for x in whole], parts


@pytest.mark.parametrize("sizes", PLACES, ids=str)
def test_located_is_where_elements_are(sizes):
    n = math.prod(sizes.values())

    @settings(max_examples=15)
    @given(groups)
    def law(rows):
        classes = {"live": Lying, "double": Lying, "tied": Tied, "none": type(None), "frozen": tuple}
        for buffers, seen, types, parts in ranks(n)(found, rows, sizes):
            assert types == [classes[kind] for _, kind in rows] and parts <= {n}
            for x, y in zip(buffers, seen, strict=True):
                assert torch.equal(torch.where(y < 0, 0.0, y), x.double())      # -1 is where nothing is said to be: padding

    law()


def left(rows, sizes, keep):
    """A stored group without some leaves, gathered; and how many elements of it this rank has."""
    part = stored(made(rows), sizes)
    buffers, spec = tree_flatten(part)
    some = without(tree_unflatten(spec, range(len(buffers))), iter(keep))
    taken = lambda x, intervals: x if intervals is None else torch.cat([x[:0], *(x[a:b] for a, b in intervals)])
    mine = tree_map(lambda k: taken(buffers[k.buffer], k.intervals), some)
    assert all(isinstance(k, Kept) for k in tree_leaves(some))
    located(mine)
    return gathered(mine), sum(x.numel() for x in tree_leaves(mine))


@pytest.mark.parametrize("sizes", PLACES, ids=str)
def test_without_some_leaves_gathered_is_gathered_without_them(sizes):
    n = math.prod(sizes.values())

    @settings(max_examples=15)
    @given(groups, st.data())
    def law(rows, data):
        group = only_live(made(rows))
        keep = data.draw(st.lists(st.booleans(), min_size=len(live(group)), max_size=len(live(group))))
        flags = iter(keep)
        expected = [x if not isinstance(x, torch.Tensor) or next(flags) else () for x in group]
        results = ranks(n)(left, rows, sizes, keep)
        for got, _ in results:
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(y, torch.Tensor) else type(x) is type(y)
        kept = sum(x.numel() for x in expected if isinstance(x, torch.Tensor))
        assert sum(count for _, count in results) == (kept if sizes else n * kept)      # no padding, and each element once

    law()


def test_a_slice_is_one_part_of_as_many_as_its_axis_is_long():
    def run():
        axis = mesh(data=2).axis("data")
        return located({"a": Piece(torch.ones(3), axis, 1, 0), "b": Piece(torch.ones(3), axis, 2, 0), "c": ()})

    for whole in ranks(2)(run):
        assert (whole["a"].parts, whole["b"].parts) == (2, 1) and is_gone(whole["c"])
