"""Trees cut into groups: every tree comes back whole, and what could be lost or confused is refused."""
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fspeed as fs
from fspeed.record import digest
from fspeed.shard.piece import Frozen, Tied
from fspeed.shard.pytree import register, tree_leaves, tree_paths, tree_structure
from fspeed.testing.trees import tensors, trees
from fspeed.tree import ROOT, abstract, by_group, chooser, cut, lazy, matches, natural, whole

T = torch.tensor
Pair = namedtuple("Pair", "w b")


@dataclass
class Dense:
    w: torch.Tensor
    b: torch.Tensor | None


register(Dense, ("w", "b"))


def assert_same(got, expected):
    assert tree_structure(got) == tree_structure(expected)
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert digest(a) == digest(b)       # bitwise, NaNs too


@given(trees(tensors()), st.sampled_from([(), "a", "*", "*/*", ["a", "b/*"], lambda path: path.endswith("b")]))
def test_any_tree_cut_anywhere_is_whole_again(tree, layers):
    paths = tree_paths(tree)
    assume(len(set(paths)) == len(paths))
    assume(any(x.is_floating_point() or x.is_complex() for x in tree_leaves(tree)))
    try:
        groups = cut(tree, chooser(layers))
    except ValueError as error:
        assume("matches nothing" not in str(error))
        raise
    assert_same(whole(groups), tree)
    assert [x.shape for x in tree_leaves(abstract(groups))] == [x.shape for x in tree_leaves(tree)]
    numbered = by_group(groups, tree_structure(tree).unflatten(range(len(paths))))
    assert sorted(i for values in numbered.values() for i in values) == list(range(len(paths)))


ODD = {
    "empty dicts and lists": {"a": {}, "b": T(1.0), "c": [], "d": ()},
    "None": {"a": None, "b": [None, T(1.0)]},
    "named tuples": {"l": [Pair(T(1.0), T(2.0)), Pair(T(3.0), None)]},
    "dataclasses": {"l": [Dense(T(1.0), T(2.0)), Dense(T(3.0), None)]},
    "int keys": {0: {1: T(1.0)}, 1: {1: T(2.0)}},
    "lists of lists": [[T(1.0), [T(2.0)]], [[T(3.0)]]],
    "ordered dicts": OrderedDict(z=T(1.0), a=T(2.0)),
    "keys with slashes": {"a/b": T(1.0), "c": {"d/e": T(2.0)}},
    "an empty key": {"": T(1.0), "b": T(2.0)},
    "a single tensor": T(1.0),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("layers", [(), "**"])
def test_odd_trees_come_back(name, layers):
    one_leaf = isinstance(ODD[name], torch.Tensor)      # has no subtree to be a layer
    assert_same(whole(cut(ODD[name], chooser(() if one_leaf else layers))), ODD[name])


@pytest.mark.parametrize("params", [{"a/b": T(1.0), "a": {"b": T(2.0)}}, {0: T(1.0), "0": T(2.0)}])
def test_two_leaves_of_one_path_are_refused(params):
    """They would be stored as one."""
    with pytest.raises(ValueError, match=r"2 leaves of the path '(a/b|0)'"):
        cut(params)


def test_a_layer_that_is_called_as_the_root_group_is_refused():
    with pytest.raises(ValueError, match="chooses 'root'"):
        cut({"root": {"w": T(1.0)}, "b": T(2.0)}, chooser("root"))


@pytest.mark.parametrize("layers, named", [
    ("block/*", "'block/\\*'"), (["blocks/*", "blocks/*/mlp"], "'blocks/\\*/mlp'"), (lambda path: False, "lambda"),
])
def test_layers_that_match_nothing_are_refused_with_what_there_is(layers, named):
    with pytest.raises(ValueError, match=f"layers=.*{named}.*matches nothing.*'blocks', 'blocks/0', 'blocks/0/w'"):
        cut({"blocks": [{"w": T(1.0)}], "b": T(2.0)}, chooser(layers))


def test_a_pattern_inside_another_layer_is_no_idle_one():
    assert cut({"a": {"b": {"w": T(1.0)}}}, chooser(["a", "a/b"])).names == ("a",)


@pytest.mark.parametrize("params, says", [
    ({}, "an empty tree"), ({"i": T(1)}, "'i' \\(torch.int64\\)"), ({"w": 1.0}, "'w' is a float"), ({"w": "x"}, "'w' is a str"),
])
def test_what_cannot_be_trained_is_refused(params, says):
    with pytest.raises(ValueError, match=says):
        cut(params)


def test_ties_are_stored_once_in_a_group_and_refused_between_groups():
    """Case 12: by identity of the tensor, not of its memory."""
    w = torch.ones(2)
    group = cut({"a": w, "b": {"c": w}, "d": w[:]})[ROOT]
    assert [type(group[k]) for k in ("a", "b/c", "d")] == [torch.Tensor, Tied, torch.Tensor]
    back = whole(cut({"a": w, "b": {"c": w}}))
    assert back["a"] is back["b"]["c"]
    with pytest.raises(ValueError, match="'a' and 'l/w' are one tensor"):
        cut({"a": w, "l": {"w": w}}, chooser("l"))


def test_a_layer_used_twice_is_stored_once():
    layer = {"w": torch.ones(2)}
    groups = cut({"l": [layer, layer]}, chooser("l/*"))
    assert groups.names == ("l/0",) and len(tree_leaves(groups)) == 1
    assert torch.equal(whole(groups)["l"][1]["w"], layer["w"])


def test_what_is_not_trained_is_frozen():
    group = cut({"w": T(1.0), "s": T(2.0), "i": T(3), "m": T(True)}, trainable=lambda path: path != "s")[ROOT]
    assert {k for k, x in group.items() if isinstance(x, Frozen)} == {"s", "i", "m"}


def test_a_state_has_its_own_copy_and_tracks_no_parameter():
    weight = torch.nn.Linear(2, 2).weight
    for x in (weight, lazy(lambda: weight)):
        stored = cut({"w": x})[ROOT]["w"]
        assert type(stored) is torch.Tensor and not stored.requires_grad
    assert cut({"w": weight})[ROOT]["w"].data_ptr() != weight.data_ptr()


def test_lazy_leaves_are_made_one_group_at_a_time():
    alive, most = [], []

    def made():
        alive.append(1)
        most.append(len(alive))
        return torch.ones(3)

    def place(name, group):
        assert all(isinstance(x, torch.Tensor) for x in tree_leaves(group))
        alive.clear()
        return group

    cut({"l": [{"a": lazy(made), "b": lazy(made)} for _ in range(4)]}, chooser("l/*"), place=(("", place),))
    assert most == [1, 2] * 4


@pytest.mark.parametrize("pattern, path, expected", [
    ("a", "a", True), ("a", "a/b", False), ("*", "a", True), ("a*/w", "ab/w", True), ("**", "a/b/c", True), ("**/w", "w", True),
    ("a/**/w", "a/w", True), ("a/**/w", "a/b/c/w", True), ("a/[0-2]", "a/1", True), ("a/[0-2]", "a/3", False), ("", "a", False),
])
def test_globs(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_layers_come_in_natural_order():
    groups = cut({"l": [{"w": T(float(i))} for i in range(11)]}, chooser("l/*"))
    assert list(groups.names) == [f"l/{i}" for i in range(11)] == sorted(groups.names, key=natural)


def test_a_node_of_one_s_own_goes_through_a_step():
    params = Dense(torch.ones(2), torch.zeros(()))
    step = fs.zero_shard(fs.step(lambda p, x, key: fs.mean(x @ p.w + p.b), fs.optim.sgd(1.0)), fs.mesh(data=1), stage=3)
    state, _ = step(step.init(params), torch.ones(3, 2))
    assert_same(step.params(state), Dense(torch.zeros(2), torch.tensor(-1.0)))
