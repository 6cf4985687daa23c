"""Which leaf of the whole tree each stored element belongs to: what norms, masks and ratios of single leaves go by.

A plain tree's leaves are themselves. In `Groups`, a leaf may lie in slices of flat buffers, on several ranks; it goes by its
number in the whole tree, the same on every rank.
"""
import functools
import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.shard.piece import Absent, Flat, Piece, Segment, Tied, is_gone, segments
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten
from fspeed.tree import Groups, abstract, by_group

UNKNOWN = torch.empty(2**40, dtype=torch.int8, device="meta")       # in place of a leaf whose size the structure does not say


class Leaf(NamedTuple):
    """The number of a leaf in the whole tree, and how many ranks hold the same elements of it."""
    number: int
    holders: int


def parts(tree: Any) -> list[list[Segment]]:
    """For each of `tree_leaves(tree)`, the segments of its elements, each with its `Leaf`; padding is in none.

    A leaf that is stored by itself has one segment, which ends at its end or beyond.

    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.shard.piece import shard
    >>> from fspeed.tree import cut
    >>> flat = lambda name, group: shard(group, mesh(data=1).axis("data"))
    >>> parts(cut({"b": torch.ones(2), "w": torch.ones(3)}, place=(("flat", flat),)))
    [[Segment(start=0, stop=2, value=Leaf(number=0, holders=1)), Segment(start=2, stop=5, value=Leaf(number=1, holders=1))]]
    """
    if isinstance(tree, Groups):
        return _parts(tree_structure(tree))     # type: ignore[arg-type]
    return [[Segment(0, x.numel(), Leaf(i, 1))] for i, x in enumerate(tree_leaves(tree))]


@functools.lru_cache(maxsize=64)
def _parts(structure: Any) -> list[list[Segment]]:
    groups: Any = tree_unflatten(structure, [UNKNOWN] * structure.num_leaves)
    ranks = math.prod(axis.size for axis in groups.axes)
    found: list[list[Segment]] = []
    first = 0
    for (_, group), infos in zip(groups.items(), groups.skeleton.leaves, strict=True):
        if not isinstance(group, Absent):
            held = list(_holders(group, ranks))
            found += segments(group, iter([Leaf(first + i, n) for i, n in enumerate(held) if n]))
        first += len(infos)
    return found


def _holders(group: Any, ranks: int) -> Iterator[int]:
    """For each leaf of a group, how many of the ranks hold the same of it; 0 for one that is tied to another."""
    for node in tree_leaves(group, is_leaf=lambda x: is_gone(x) or isinstance(x, (Piece, Tied))):
        if not isinstance(node, Piece):
            yield 0 if isinstance(node, Tied) else ranks
            continue
        flat = isinstance(node.layout, Flat)
        inner = tree_unflatten(node.layout.spec, [0] * len(node.layout.shapes)) if flat else node.value
        yield from _holders(inner, ranks // node.axis.size * node.holders)


def runs(found: list[Segment], value: Callable[[Leaf], Any]) -> list[Segment]:
    """The segments of a buffer, neighbours with the same value joined; padding, all zeros, goes with what is before it."""
    starts = [next(run) for _, run in groupby(found, key=lambda s: id(value(s.value)))]
    stops = [*(s.start for s in starts[1:]), UNKNOWN.numel()]
    return [Segment(0 if i == 0 else s.start, stop, value(s.value)) for i, (s, stop) in enumerate(zip(starts, stops, strict=True))]


def pieces(value: Callable[[Leaf], Any], tree: Any, *others: Any) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """(value, elements of the trees) for each stretch of elements whose leaves have the same value."""
    for found, xs in zip(parts(tree), zip(*map(tree_leaves, (tree, *others)), strict=True), strict=True):
        for start, stop, v in runs(found, value):
            yield v, _sliced(xs, start, stop)


def by_leaf(f: Callable[..., Tensor], values: list, tree: Any, *others: Any) -> Any:
    """f(value, x, ...) on each leaf's elements, values[i] being the value for leaf i; it must map zeros, the padding, to zeros.

    >>> by_leaf(lambda v, x: v * x, [2, 3], {"a": torch.ones(1), "b": torch.ones(2)})
    {'a': tensor([2.]), 'b': tensor([3., 3.])}
    """
    leaves, spec = tree_flatten(tree)
    out = []
    for found, xs in zip(parts(tree), zip(leaves, *map(tree_leaves, others), strict=True), strict=True):
        new = [f(v, *_sliced(xs, start, stop)) for start, stop, v in runs(found, lambda leaf: values[leaf.number])]
        out.append(torch.cat(new) if len(new) > 1 else new[0] if new else xs[0])
    return tree_unflatten(spec, out)


def _sliced(xs: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return xs if start == 0 and stop >= xs[0].numel() else tuple(x[start:stop] for x in xs)


# ---------------------------------------------------------------- masks
def spread(values: Any, tree: Any) -> list:
    """One value for each leaf of the whole tree, in order, from a plain tree of values.

    Args:
        values: a tree of the whole tree's structure or of a prefix of it; or a function of it. It sees the plain tree; of `Groups`,
            meta tensors.
        tree: `Groups`, or a plain tree.

    >>> spread(lambda params: tree_map(lambda p: p.dim() > 1, params), {"b": torch.ones(2), "w": torch.ones(2, 2)})
    [False, True]
    """
    whole = abstract(tree) if isinstance(tree, Groups) else tree
    if callable(values):
        values = values(whole)
    full = tree_map(lambda v, sub: tree_map(lambda _: v, sub), values, whole)
    if not isinstance(tree, Groups):
        return tree_leaves(full)
    found = by_group(tree, full)
    return [v for name in tree.names for v in found[name]]
