"""Which leaf of the whole tree each stored element belongs to: what norms, masks and ratios of single leaves go by.

A plain tree's leaves are themselves. In `Groups`, a leaf may lie in slices of flat buffers, on several ranks; it goes by its
number in the whole tree, the same on every rank.
"""
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.shard.parts import Kept, Lying, located, without
from fspeed.shard.piece import Absent
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten
from fspeed.tree import Groups, abstract, by_group

ALL = 2**40             # where the only segment of a leaf that is stored by itself ends: at its end, whatever its size
UNKNOWN = torch.empty(ALL, dtype=torch.int8, device="meta")


class Segment(NamedTuple):
    """Elements start to stop of a stored leaf, and what holds for them."""
    start: int
    stop: int
    value: Any


class Leaf(NamedTuple):
    """The number of a leaf in the whole tree, and how many ranks hold the same elements of it."""
    number: int
    holders: int


NUMBER, HOLDERS = attrgetter("number"), attrgetter("holders")


def LEAF(leaf: Leaf) -> Leaf:
    return leaf


class ByNumber(NamedTuple):
    """A value of each leaf, by its number."""
    values: tuple

    def __call__(self, leaf: Leaf) -> Any:
        return self.values[leaf.number]


def parts(tree: Any) -> list[list[Segment]]:
    """For each of `tree_leaves(tree)`, the segments of its elements, each with its `Leaf`; padding is in none.

    A leaf that is stored by itself has one segment, which ends at `ALL`.

    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.shard.piece import shard
    >>> from fspeed.tree import cut
    >>> flat = lambda name, group: shard(group, mesh(data=1).axis("data"))
    >>> parts(cut({"b": torch.ones(2), "w": torch.ones(3)}, place=(("flat", flat),)))
    [[Segment(start=0, stop=2, value=Leaf(number=0, holders=1)), Segment(start=2, stop=5, value=Leaf(number=1, holders=1))]]
    """
    return _parts(tree_structure(tree))


@functools.lru_cache(maxsize=64)
def _parts(structure: Any) -> list[list[Segment]]:
    groups: Any = tree_unflatten(structure, [UNKNOWN] * structure.num_leaves)
    if not isinstance(groups, Groups):
        return [[Segment(0, ALL, Leaf(i, 1))] for i in range(structure.num_leaves)]
    ranks = math.prod(axis.size for axis in groups.axes)
    found: list[list[Segment]] = []
    for (_, group), leaves in zip(groups.here(), _numbered(groups), strict=True):
        here: list[list[Segment]] = [[] for _ in tree_leaves(group)]
        for number, lying in leaves:
            for run in lying.runs:
                length = min(run.stop - run.first, ALL)
                here[run.buffer].append(Segment(run.start, run.start + length, Leaf(number, ranks // lying.parts)))
        found += [sorted(segments) for segments in here]
    return found


def _numbered(groups: Groups) -> Iterator[list[tuple[int, Lying]]]:
    """(number, where it lies) of the live leaves, of each group that is here."""
    first = 0
    for (_, group), spec in zip(groups.items(), groups.skeleton.specs, strict=True):
        if not isinstance(group, Absent):
            leaves = enumerate(spec.flatten_up_to(located(group)), first)
            yield [(i, x) for i, x in leaves if isinstance(x, Lying)]
        first += spec.num_leaves


def every(tree: Any, value: Any = None) -> list:
    """The same value for each leaf of the whole tree."""
    return [value] * (sum(map(len, tree.skeleton.leaves)) if isinstance(tree, Groups) else len(tree_leaves(tree)))


def numbers(tree: Any) -> list[list[int]]:
    """The numbers of the live leaves, of each group that is here."""
    if not isinstance(tree, Groups):
        return [list(range(len(tree_leaves(tree))))]
    return _numbers(tree_structure(tree))


@functools.lru_cache(maxsize=64)
def _numbers(structure: Any) -> list[list[int]]:
    groups: Any = tree_unflatten(structure, [UNKNOWN] * structure.num_leaves)
    return [[i for i, _ in leaves] for leaves in _numbered(groups)]


@functools.lru_cache(maxsize=64)
def left(structure: Any, keep: tuple[bool, ...], unseen: Any) -> tuple[Any, tuple[Kept, ...]]:
    """A tree without some of its leaves: its structure, and what each of its leaves has of those of the tree.

    Args:
        structure: of the tree.
        keep: for each leaf of the whole tree, whether it stays.
        unseen: what stands in place of the others in a plain tree; in `Groups`, `()`.
    """
    tree: Any = tree_unflatten(structure, range(structure.num_leaves))
    if isinstance(tree, Groups):
        flags = iter([iter([keep[i] for i in group]) for group in _numbers(structure)])
        some = tree.map(lambda name, group: without(group, next(flags)))
    else:
        some = tree_map(lambda i: Kept(i) if keep[i] else unseen, tree)
    kept, spec = tree_flatten(some)
    return spec, tuple(kept)


@functools.lru_cache(maxsize=64)
def _stretches(structure: Any, value: Callable[[Leaf], Any]) -> list[list[Segment]]:
    """The segments of each buffer with a value of their leaf, those joined that touch and have the same."""
    return [_joined([s._replace(value=value(s.value)) for s in found]) for found in _parts(structure)]


def _joined(found: list[Segment]) -> list[Segment]:
    out: list[Segment] = []
    for s in found:
        if out and out[-1].stop == s.start and out[-1].value == s.value:
            s = s._replace(start=out.pop().start)
        out.append(s)
    return out


def pieces(value: Any, tree: Any, *others: Any) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """(value, elements of the trees) for each stretch of elements whose leaves have the same value; without padding.

    Args:
        value: of a `Leaf`: `NUMBER`, `HOLDERS`, `LEAF`, `ByNumber(values)`.
        tree, others: trees that are stored alike.
    """
    leaves, spec = tree_flatten(tree)
    for found, xs in zip(_stretches(spec, value), zip(leaves, *map(spec.flatten_up_to, others), strict=True), strict=True):
        for start, stop, v in found:
            yield v, _sliced(xs, start, stop)


def by_leaf(f: Callable[..., Tensor], values: Sequence, tree: Any, *others: Any) -> Any:
    """f(value, x, ...) on each leaf's elements, values[i] being the value for leaf i; padding goes with what is before it.

    >>> by_leaf(lambda v, x: v * x, [2, 3], {"a": torch.ones(1), "b": torch.ones(2)})
    {'a': tensor([2.]), 'b': tensor([3., 3.])}
    """
    leaves, spec = tree_flatten(tree)
    single = any(isinstance(v, Tensor) for v in values)                 # then no two leaves are treated alike
    stretches = _stretches(spec, NUMBER if single else ByNumber(tuple(values)))
    out = []
    for found, xs in zip(stretches, zip(leaves, *map(tree_leaves, others), strict=True), strict=True):
        ends = [0, *(s.start for s in found[1:]), ALL]
        new = [
            f(values[v] if single else v, *_sliced(xs, start, stop))
            for (_, _, v), start, stop in zip(found, ends, ends[1:], strict=False)
        ]
        out.append(torch.cat(new) if len(new) > 1 else new[0] if new else xs[0])
    return tree_unflatten(spec, out)


def _sliced(xs: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return xs if start == 0 and stop == ALL else tuple(x[start:stop] for x in xs)


# ---------------------------------------------------------------- masks
def spread(values: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple:
    """One value for each leaf of the whole tree, in order, from a plain tree of values.

    Args:
        values: a tree of the whole tree's structure or of a prefix of it; or a function of it. It sees the plain tree; of `Groups`,
            meta tensors, and then what it returned is remembered.
        tree: `Groups`, or a plain tree.
        is_leaf: what to take as a value though it has children, or is None.

    >>> spread(lambda params: tree_map(lambda p: p.dim() > 1, params), {"b": torch.ones(2), "w": torch.ones(2, 2)})
    (False, True)
    """
    if isinstance(tree, Groups):
        return (_spread if callable(values) else _spread.__wrapped__)(values, tree_structure(tree), is_leaf)
    out: list = []
    made = values(tree) if callable(values) else values
    fitted(lambda v, sub: out.extend([v] * len(tree_leaves(sub))), made, tree, is_leaf)
    return tuple(out)


@functools.lru_cache(maxsize=64)
def _spread(values: Any, structure: Any, is_leaf: Callable[[Any], bool] | None) -> tuple:
    groups: Any = tree_unflatten(structure, [UNKNOWN] * structure.num_leaves)
    whole = abstract(groups)
    made = values(whole) if callable(values) else values
    found = by_group(groups, fitted(lambda v, sub: tree_map(lambda _: v, sub), made, whole, is_leaf))
    return tuple(v for name in groups.names for v in found[name])


def fitted(f: Callable[[Any, Any], Any], values: Any, tree: Any, is_leaf: Callable[[Any], bool] | None) -> Any:
    """f(value, subtree) for a tree of values that is a prefix of a tree; ValueError if it is none."""
    try:
        return tree_map(f, values, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"a mask, or a tree of labels, does not fit the parameters: {str(error).split('; dict:')[0]}; give it their structure, "
            "a prefix of it, or a function that makes it from them"
        ) from error


def as_function(values: Any) -> Callable[[Any], Any]:
    """A tree of values as a function of the parameters, which `spread` remembers the result of."""
    return values if callable(values) else lambda params: values
