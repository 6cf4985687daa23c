"""Norms, clips and masks on every placement, by their cases."""
import math

import pytest
import torch

from fspeed import optim
from fspeed.optim.leaves import parts
from fspeed.optim.norms import leaf_norms, leaf_rms
from fspeed.shard.piece import Piece, is_gone, only_live, shard
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import mesh, ranks
from fspeed.tree import Groups, cut, whole

INF, NAN = math.inf, math.nan


def clipped(grads, max_norm):
    opt = optim.clip_by_global_norm(max_norm)
    return opt.update(grads, opt.init(grads))[0]


def flat(tree, axis, axes, trainable=lambda path: True):
    return only_live(cut(tree, trainable=trainable, place=(("flat", lambda name, group: shard(group, axis)),), axes=axes))


def sharded_three_and_four():
    axis = mesh(data=2).axis("data")
    grads = flat({"w": torch.cat([torch.full((1,), 3.0), torch.zeros(15), torch.full((1,), 4.0)])}, axis, (axis,))
    return optim.global_norm(grads), whole(clipped(grads, 1.0))["w"][[0, 16]]


def test_case_25_shards_of_3_and_4_have_norm_5_on_both_ranks():
    for norm, parts_ in ranks(2)(sharded_three_and_four):
        assert norm == 5
        torch.testing.assert_close(parts_, torch.tensor([0.6, 0.8]))


def sharded_and_replicated(sizes):
    """A slice of 4s over `model`, divided into flat shards over `data`, beside a replicated 3."""
    grid = mesh(**sizes)
    model, data = grid.axis("model"), grid.axis("data")
    slices = lambda name, g: {**g, "w": Piece(g["w"].chunk(model.size)[model.rank].clone(), model, 1, 0)}
    place = (("slices", slices), ("flat", lambda name, g: shard(g, data)))
    tree = {"b": torch.tensor([3.0]), "w": torch.full((4,), 2.0)}
    tree = only_live(cut(tree, place=place, axes=grid.axes))
    return optim.global_norm(tree), leaf_norms(tree)


@pytest.mark.parametrize("model, data, more", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_case_26_a_replicated_leaf_counts_once_on_any_mesh(model, data, more):
    for norm, norms in ranks(model * data * more)(sharded_and_replicated, {"model": model, "data": data, "more": more}):
        torch.testing.assert_close(norm, torch.tensor(5.0))
        torch.testing.assert_close(norms, torch.tensor([[3.0, 4.0]]))


def test_a_norm_is_of_plain_trees_of_any_dtype():
    twelve = torch.tensor(12.0, dtype=torch.float64)
    tree = {"a": torch.tensor([3.0], dtype=torch.bfloat16), "c": torch.tensor([4j]), "d": twelve, "n": None}
    norm = optim.global_norm(tree)
    assert norm == 13 and norm.dtype == torch.float64
    assert optim.global_norm({}) == 0
    assert optim.global_norm({"z": torch.zeros(0, 8)}) == 0
    assert optim.global_norm({"h": torch.full((4,), 300.0, dtype=torch.float16)}) == 600      # 90000 is beyond float16


def test_a_clip_at_its_edges():
    params = {"a": torch.tensor([1.0, 2.0]), "z": torch.zeros(0, 8)}
    assert torch.equal(clipped(params, 100.0)["a"], params["a"])
    assert torch.equal(clipped(params, 0.0)["a"], torch.zeros(2))
    assert torch.equal(clipped({"a": torch.zeros(2)}, 0.0)["a"], torch.zeros(2))
    assert torch.equal(clipped({"a": torch.zeros(2)}, 1.0)["a"], torch.zeros(2))
    assert torch.equal(clipped({"a": torch.tensor([1.0, INF])}, 1.0)["a"], torch.zeros(2))
    assert torch.equal(clipped({"a": torch.tensor([1e30, 1e30])}, 1.0)["a"], torch.zeros(2))   # the square overflows
    assert clipped({"a": torch.tensor([1.0, NAN])}, 1.0)["a"].isnan().all()


def test_the_gradient_of_a_norm_at_zero_is_zero():
    grad = torch.func.grad(lambda x: optim.global_norm({"x": x}))(torch.zeros(3))
    assert torch.equal(grad, torch.zeros(3))
    grad = torch.func.grad(lambda x: leaf_rms({"x": x}).sum())(torch.zeros(3))
    assert torch.equal(grad, torch.zeros(3))


def tied_and_frozen(n):
    axis = mesh(data=n).axis("data")
    w = torch.full((3,), 2.0)
    tree = {"a": w, "b": torch.full((5,), 1.0), "frozen": torch.ones(7), "tied": w, "z": torch.ones(40)}
    stored = flat(tree, axis, (axis,), trainable=lambda path: path != "frozen")
    opt = optim.add_decayed_weights(1.0, mask={"a": False, "b": True, "frozen": True, "tied": True, "z": False})
    updates = opt.update(tree_map(torch.zeros_like, stored), opt.init(stored), stored)[0]
    return whole(updates), leaf_norms(stored)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_mask_meets_its_leaves_beside_tied_and_frozen_ones(n):
    for updates, norms in ranks(n)(tied_and_frozen, n):
        assert is_gone(updates["frozen"])
        assert [float(updates[k].sum()) for k in ("a", "b", "tied", "z")] == [0, 5, 0, 0]
        torch.testing.assert_close(norms**2, torch.tensor([[12.0, 5.0, 0.0, 0.0, 40.0]]))


def decayed(n):
    """Case 46: three steps of AdamW at zero gradients."""
    axis = mesh(data=n).axis("data")
    tree = {"b": torch.linspace(-1, 1, 5), "w": torch.linspace(1, 2, 30).view(5, 6)}
    opt = optim.adamw(0.1, weight_decay=0.1, mask=lambda params: tree_map(lambda p: p.dim() > 1, params))
    results = []
    for params in (tree, flat(tree, axis, (axis,))):
        for one_pass in (False, True):
            p, state = tree_map(torch.clone, params), opt.init(params)
            for _ in range(3):
                zero = tree_map(torch.zeros_like, p)
                if one_pass:
                    p, state = opt.apply(zero, state, p)
                else:
                    updates, state = opt.update(zero, state, p)
                    p = optim.apply_updates(p, updates)
            results.append(whole(p))
    return tree, results


@pytest.mark.parametrize("n", [1, 2, 3])
def test_case_46_masked_leaves_keep_their_bits_and_others_decay(n):
    for tree, results in ranks(n)(decayed, n):
        for p in results:
            assert torch.equal(p["b"], tree["b"])
            torch.testing.assert_close(p["w"], tree["w"] * (1 - 0.1 * 0.1) ** 3)


def more_ranks_than_elements():
    axis = mesh(data=8).axis("data")
    params = flat({"w": torch.ones(3)}, axis, (axis,))
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, mask={"w": True}))
    params, _ = opt.apply(tree_map(torch.ones_like, params), opt.init(params), params)
    return whole(params)["w"]


def test_case_19_ranks_without_elements_step_too():
    for w in ranks(8)(more_ranks_than_elements):
        torch.testing.assert_close(w, torch.full((3,), 0.9), atol=2e-5, rtol=0)


def parts_of_three_ranks():
    axis = mesh(data=3).axis("data")
    params = flat({"a": torch.ones(20), "b": torch.ones(50)}, axis, (axis,))
    return [[(s.start, s.stop, s.value.number) for s in found] for found in parts(params)]


def test_parts_end_where_a_ranks_buffer_does():
    assert ranks(3)(parts_of_three_ranks) == [[[(0, 20, 0), (20, 32, 1)]], [[(0, 32, 1)]], [[(0, 6, 1)]]]


def test_padding_is_in_no_part():
    axis = mesh(data=1).axis("data")
    params = flat({"w": torch.ones(3), "x": torch.ones(2, dtype=torch.bfloat16)}, axis, (axis,))
    assert isinstance(params, Groups)
    assert [[(s.start, s.stop, s.value.number) for s in found] for found in parts(params)] == [[(0, 3, 0)], [(0, 2, 1)]]
    opt = optim.adam(0.1, eps=0.0)          # 0 / 0 in the padding
    params, _ = opt.apply(tree_map(lambda p: (p != 0).to(p.dtype), params), opt.init(params), params)
    assert optim.global_norm(params).isfinite() and leaf_norms(params).isfinite().all()


# ---------------------------------------------------------------- optimizers of single leaves
def test_lamb_in_deepspeeds_form():
    p, g, lr, b1, b2, eps, wd = torch.tensor([3.0, 4.0]), torch.tensor([0.5, -0.1]), 0.1, 0.9, 0.999, 1e-8, 0.01
    opt = optim.lamb(lr, b1, b2, eps, weight_decay=wd, min_ratio=0.01, max_ratio=10.0, debias_rate=True)
    state, m, v = opt.init(p), torch.zeros(2), torch.zeros(2)
    for t in range(1, 5):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = m / (v.sqrt() + eps) + wd * p
        ratio = min(max(float(p.norm() / u.norm()), 0.01), 10.0)
        expected = -lr * (1 - b2**t) ** 0.5 / (1 - b1**t) * ratio * u
        updates, state = opt.update(g, state, p)
        torch.testing.assert_close(updates, expected)
        p = p + updates


@pytest.mark.parametrize("norm, ratio", [(0.0, 1.0), (1e-9, 0.01), (1e9, 10.0)])
def test_trust_ratios_are_bounded_and_1_where_a_norm_is_0(norm, ratio):
    opt = optim.scale_by_trust_ratio(min_ratio=0.01, max_ratio=10.0)
    u = torch.tensor([0.6, 0.8])
    torch.testing.assert_close(opt.update(u, (), torch.tensor([0.0, norm]))[0], ratio * u)
    assert torch.equal(opt.update(torch.zeros(2), (), torch.ones(2))[0], torch.zeros(2))


def test_muon_makes_singular_values_alike():
    source = torch.Generator().manual_seed(0)
    params = {"b": torch.zeros(3), "tall": torch.zeros(8, 3), "wide": torch.zeros(3, 8)}
    grads = tree_map(lambda p: torch.randn(p.shape, generator=source), params)
    opt = optim.scale_by_muon(nesterov=False)
    updates, _ = opt.update(grads, opt.init(params))
    assert torch.equal(updates["b"], grads["b"])
    for name in ("tall", "wide"):
        assert ((torch.linalg.svdvals(updates[name]) - 1).abs() < 0.4).all()
    both = lambda u: optim.scale_by_shape().update(u, ())[0]
    torch.testing.assert_close(both(updates)["wide"], updates["wide"] * (8 / 3) ** 0.5)
    assert torch.equal(both(updates)["tall"], updates["tall"])


def test_a_strided_leaf_is_stepped_as_a_plain_one():
    """Case 22."""
    source = torch.Generator().manual_seed(0)
    w, g = (torch.randn(6, 4, generator=source) for _ in range(2))
    for opt in (optim.adamw(0.1), optim.sgd(0.1, 0.9), optim.lion(0.1)):
        expected, _ = opt.apply(g, opt.init(w), w.clone())
        for grads in (g.t(), g.t().contiguous()):
            params = w.clone().t()
            state = opt.init(params)
            new, _ = opt.apply(grads, state, params)
            assert new.data_ptr() == params.data_ptr()
            assert torch.equal(new, expected.t())


def test_mixed_dtypes_step_each_in_its_own():
    """Case 21."""
    params = {"a": torch.ones(20, dtype=torch.bfloat16), "b": torch.ones(20), "c": torch.ones(20, dtype=torch.complex64)}
    grads = {"a": torch.ones(20), "b": torch.ones(20, dtype=torch.bfloat16), "c": torch.full((20,), 1j)}
    for opt in (optim.adamw(0.1), optim.sgd(0.1, 0.9), optim.lion(0.1)):
        plain = opt.update(grads, opt.init(params), params)
        expected = optim.apply_updates(params, plain[0])
        got, state = opt.apply(grads, opt.init(params), tree_map(torch.clone, params))
        for x, y, p in zip(tree_leaves(got), tree_leaves(expected), tree_leaves(params), strict=True):
            assert x.dtype == y.dtype == p.dtype
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
        assert [x.dtype for x in tree_leaves(state)] == [x.dtype for x in tree_leaves(plain[1])]
