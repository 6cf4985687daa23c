"""Flat shards: gather(shard(x)) == x for every tree, on any number of ranks, and every element's leaf is known."""
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fspeed.record import digest
from fspeed.shard.piece import ALIGN, Frozen, Piece, Tied, gather, live, only_live, scatter, shard, thaw
from fspeed.shard.pytree import tree_leaves, tree_map, tree_structure
from fspeed.testing import mesh, ranks
from fspeed.testing.trees import tensors, trees
from fspeed.tree import cut, whole


def same(a, b):
    """Bitwise, NaNs too."""
    return tree_structure(a) == tree_structure(b) and all(map(lambda x, y: digest(x) == digest(y), tree_leaves(a), tree_leaves(b)))


@st.composite
def groups(draw):
    """Trees as transforms get them: frozen where not differentiable, and sometimes; a leaf may come again."""
    tree = draw(trees(tensors()))
    leaves, spec = tree_leaves(tree), tree_structure(tree)
    marked = []
    for i, x in enumerate(leaves):
        tie = draw(st.integers(-3, i - 1)) if i else -1
        frozen = not (x.is_floating_point() or x.is_complex()) or draw(st.booleans())
        ok = tie >= 0 and not isinstance(marked[tie], Tied)
        marked.append(Tied(tie) if ok else Frozen(x) if frozen else x)
    return spec.unflatten(marked)


def round_trip(tree, sizes):
    grid = mesh(**sizes)
    stored = tree
    for name in sizes:
        stored = shard(stored, grid.axis(name))
    back = stored
    for _ in sizes:
        back = gather(back)
    sizes = [sum(len(x) for x in tree_leaves(stored)), sum(x.numel() for x in tree_leaves(tree))]
    return same(back, tree), same(thaw(back), thaw(tree)), sizes


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 4}, {"a": 2, "b": 2}], ids=str)
def test_gather_of_shard_is_the_tree(sizes):
    """Cases 17, 20, 21, 22: any shapes, dtypes and strides, empty, tied and frozen."""
    n = math.prod(sizes.values())

    @settings(max_examples=40)
    @given(groups())
    def law(tree):
        for equal, thawed, (kept, all_of_it) in ranks(n)(round_trip, tree, sizes):
            assert equal and thawed
            assert all_of_it <= kept * n        # padded to whole rows of 16 on each rank

    law()


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 3}, {"a": 2, "b": 2}], ids=str)
def test_five_elements_divide_over_any_mesh(sizes):
    """Case 20: gather(shard(arange(5))) == arange(5)."""
    assert all(equal for equal, *_ in ranks(math.prod(sizes.values()))(round_trip, {"x": torch.arange(5.0)}, sizes))


def test_padding_is_sixteen_elements_a_rank_at_most():
    def kept(n):
        return [len(x) for x in tree_leaves(shard({"w": torch.ones(n)}, mesh(data=3).axis("data")))]

    for n, expected in ((0, [0]), (1, [ALIGN]), (48, [ALIGN]), (49, [2 * ALIGN])):
        assert ranks(3)(kept, n) == [expected] * 3


def adjoint(tree):
    """<c, gather t> and <scatter c, t>, summed over the ranks."""
    axis = mesh(data=3).axis("data")
    piece = shard(tree, axis)
    g = torch.Generator().manual_seed(dist.get_rank())
    cotangent = tree_map(lambda x: torch.randn(x.shape, generator=g, dtype=torch.float64), only_live(tree))
    home = scatter(cotangent, piece)
    dot = lambda a, b: sum(((x * y).sum() for x, y in zip(a, b, strict=True)), torch.zeros((), dtype=torch.float64))
    return dot(tree_leaves(cotangent), live(gather(piece))), dot(tree_leaves(home), live(piece))


def test_scatter_is_the_transpose_of_gather():
    double = lambda *shape: torch.randn(shape, dtype=torch.float64)
    tree = {"a": double(5, 7), "f": Frozen(torch.ones(3)), "b": double(), "z": double(0)}
    left, right = (sum(x) for x in zip(*ranks(3)(adjoint, tree), strict=True))
    torch.testing.assert_close(left, right, rtol=1e-12, atol=0)


def test_scatter_sums_in_float32_unless_told():
    def run(dtype):
        piece = shard({"w": torch.zeros(32, dtype=torch.bfloat16)}, mesh(data=2).axis("data"))
        return scatter({"w": torch.full((32,), 256.0 if dist.get_rank() else 1.0, dtype=torch.bfloat16)}, piece, dtype).value[0]

    assert [x.dtype for x in ranks(2)(run, None)] == [torch.float32] * 2
    assert all((x == 257).all() for x in ranks(2)(run, None))
    assert all((x == 256).all() for x in ranks(2)(run, torch.bfloat16))


def test_pieces_are_nodes_of_every_tree_library():
    piece = shard({"w": torch.ones(3)}, mesh(data=1).axis("data"))
    leaves, spec = torch.utils._pytree.tree_flatten(piece)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, Piece) and same(gather(again), {"w": torch.ones(3)})


def test_groups_gather_whatever_their_placement():
    def run():
        axis = mesh(data=2).axis("data")
        tree = {"w": torch.arange(5.0), "i": torch.arange(3)}
        return same(whole(cut(tree, place=(("flat", lambda name, group: shard(group, axis)),))), tree)

    assert all(ranks(2)(run))
