"""Computing on whole leaves, wherever they are stored: gathered, transformed, and one's own part kept."""
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fspeed.optim.leaves import numbers
from fspeed.shard.piece import GONE, Flat, Piece, Stage, cut_slice, is_gone
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fspeed.tree import Groups, gathered, in_parts


def on_whole(f: Callable[..., Any], values: Sequence, tree: Any, *states: Any) -> tuple[Any, ...]:
    """f(values[i], x, *s) -> (new x, *new s) on every whole leaf i; x of a tree as it is stored, s of trees of whole leaves.

    Returns:
        The tree, stored as it was, and the trees of whole leaves.

    Cost: (N-1)/N of the tree's bytes sent by each rank where it lies in flat shards, one all-gather a buffer, and one whole group
        at a time beside it. Every rank computes every leaf.

    >>> on_whole(lambda v, x, s: (v * x, s + 1), [2, 3], {"a": torch.ones(1), "b": torch.ones(1)}, {"a": 0, "b": 1})
    ({'a': tensor([2.]), 'b': tensor([3.])}, {'a': 1, 'b': 2})
    """
    if not isinstance(tree, Groups):
        return _on_group(f, values, tree, *states)
    by_group = iter(numbers(tree))
    rows = tree.map(lambda name, *group: _on_group(f, [values[i] for i in next(by_group)], *group), *states)
    return tuple(rows.map(lambda name, row, i=i: row[i]) for i in range(1 + len(states)))


def _on_group(f: Callable[..., Any], values: Sequence, group: Any, *states: Any) -> tuple[Any, ...]:
    leaves, spec = tree_flatten(gathered(group))
    specs = [spec, *(tree_flatten(s)[1] for s in states)]
    rows = [f(*row) for row in zip(values, leaves, *map(tree_leaves, states), strict=True)]
    out, *new = zip(*rows, strict=True) if rows else [()] * len(specs)
    return placed_like(group, iter(out)), *map(tree_unflatten, specs[1:], new)


def placed_like(stored: Any, leaves: Iterator[Tensor]) -> Any:
    """Whole leaves, each rank's own part of them, as a group is stored; no communication."""
    nodes, spec = tree_flatten(stored, is_leaf=lambda x: isinstance(x, Piece))
    return tree_unflatten(spec, [_own_part(n, leaves) if isinstance(n, Piece) else next(leaves) for n in nodes])


def _own_part(piece: Piece, leaves: Iterator[Tensor]) -> Piece:
    layout = piece.layout
    if isinstance(layout, Stage):
        return Piece(placed_like(piece.value, leaves), piece.axis, piece.holders, layout)
    if not isinstance(layout, Flat):
        return cut_slice(placed_like(piece.value, leaves), piece.axis, layout)
    inner = tree_unflatten(layout.spec, [GONE if is_gone(piece.value[at]) else 0 for at in layout.place])
    given = iter(tree_leaves(placed_like(inner, leaves)))
    buckets: list[list[Tensor]] = [[] for _ in layout.buckets]
    for at in layout.place:
        if not is_gone(piece.value[at]):
            buckets[at].append(next(given).reshape(-1))
    bounds = [layout.bounds(i, piece.axis.size)[piece.axis.rank :][:2] for i in range(len(buckets))]
    value = tuple(_cut(xs, *b) if xs else GONE for xs, b in zip(buckets, bounds, strict=True))
    return Piece(value, piece.axis, piece.holders, layout)


def _cut(xs: list[Tensor], start: int, stop: int) -> Tensor:
    """Elements start to stop of tensors laid end to end, and zeros behind the end."""
    part = torch.cat(xs)[start:stop]
    return torch.cat([part, part.new_zeros(stop - start - len(part))])


def outline(tree: Any) -> Any:
    """A tree whose whole leaves have shapes, dtypes and devices, but no memory; no communication."""
    if isinstance(tree, Groups):
        return tree.map(lambda name, group: outline(group))
    if not any(map(in_parts, tree_leaves(tree, is_leaf=in_parts))):
        return tree
    return outline(tree_map(lambda x: _outlined(x) if in_parts(x) else x, tree, is_leaf=in_parts))


def _outlined(piece: Piece) -> Any:
    layout, size = piece.layout, piece.axis.size
    if not isinstance(layout, Flat):
        grown = lambda shape: [n * size if dim == layout else n for dim, n in enumerate(shape)]
        return tree_map(lambda x: x.new_empty(()).expand(grown(x.shape)), outline(piece.value))
    rows = [(piece.value[at], shape) for at, shape in zip(layout.place, layout.shapes, strict=True)]
    return tree_unflatten(layout.spec, [GONE if is_gone(x) else x.new_empty(()).expand(shape) for x, shape in rows])
