"""Which elements of which leaves are where in a stored group, and a stored group without some of its leaves; nothing is sent."""
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

from .piece import GONE, Bucket, Flat, Piece, is_gone
from .pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


class Run(NamedTuple):
    """Elements first to stop of a leaf, laid end to end, which are in the buffer-th stored leaf from start on."""
    buffer: int
    start: int
    first: int
    stop: int


@dataclass(frozen=True)
class Lying:
    """Where this rank has its elements of a leaf, and how many parts there are that are not the same. No pytree node."""
    runs: tuple[Run, ...]
    parts: int | Fraction = 1


def located(stored: Any) -> Any:
    """The whole group of which this rank stores a part, with a `Lying` in place of each live leaf.

    Args:
        stored: a group in the form of gradients and moments: leaves, `Piece`s, `()` where nothing is kept.

    >>> import torch
    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.shard.piece import shard
    >>> located(shard({"b": torch.zeros(3), "w": torch.zeros(2, 2)}, mesh(data=1).axis("data")))["w"]
    Lying(runs=(Run(buffer=0, start=3, first=0, stop=4),), parts=Fraction(1, 1))
    """
    leaves, spec = tree_flatten(stored)
    return _opened(tree_unflatten(spec, [Lying((Run(i, 0, 0, x.numel()),)) for i, x in enumerate(leaves)]))


def _opened(tree: Any) -> Any:
    """A tree of `Lying` buffers with whole groups in place of pieces."""
    is_piece = lambda x: isinstance(x, Piece)
    if not any(map(is_piece, tree_leaves(tree, is_leaf=is_piece))):
        return tree
    return tree_map(lambda x: _opened(_within(x)) if is_piece(x) else x, tree, is_leaf=is_piece)


def _within(piece: Piece) -> Any:
    """What a piece of `Lying` buffers is a part of, one level up."""
    size, layout = piece.axis.size, piece.layout
    if not isinstance(layout, Flat):
        return tree_map(lambda x: Lying(x.runs, Fraction(x.parts * size, piece.holders)), piece.value)
    out: list[Any] = []
    for (begin, end), at in zip(offsets(layout), layout.place, strict=True):
        lying, (mine, next_) = piece.value[at], layout.bounds(at, size)[piece.axis.rank :][:2]
        if is_gone(lying):
            out.append(GONE)
            continue
        runs = [_overlap(run, begin - mine, min(end, next_) - mine) for run in lying.runs]
        out.append(Lying(tuple(r for r in runs if r.first < r.stop), Fraction(lying.parts * size, piece.holders)))
    return tree_unflatten(layout.spec, out)


def _overlap(run: Run, begin: int, end: int) -> Run:
    """What a run of a buffer has of the leaf that begins at begin of the buffer, up to end."""
    first, stop = max(run.first, begin), min(run.stop, end)
    return Run(run.buffer, run.start + first - run.first, first - begin, stop - begin)


def offsets(layout: Flat) -> list[tuple[int, int]]:
    """Where each leaf begins and ends in its bucket."""
    sizes = [math.prod(shape) for shape in layout.shapes]
    out: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    for i in range(len(layout.buckets)):
        members = [j for j, at in enumerate(layout.place) if at == i]
        ends = list(accumulate(sizes[j] for j in members))
        for j, end in zip(members, ends, strict=True):
            out[j] = (end - sizes[j], end)
    return out


# ---------------------------------------------------------------- without some leaves
@dataclass(frozen=True)
class Kept:
    """What is kept of the buffer-th stored leaf: intervals of its elements, or None for all. No pytree node."""
    buffer: int
    intervals: tuple[tuple[int, int], ...] | None = None


def without(stored: Any, keep: Iterator[bool]) -> Any:
    """A stored group without some of its leaves: `()` in their place, and a `Kept` in place of each stored leaf that is left.

    A flat shard of what is left is divided where the shard of all was, so every rank keeps a part of what it has.

    Args:
        stored: a group in the form of gradients and moments, whose leaves are numbers, one each.
        keep: for each live leaf of the whole group, in order, whether it stays.

    >>> import torch
    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.shard.piece import shard
    >>> piece = shard({"b": torch.zeros(3), "w": torch.zeros(2, 2)}, mesh(data=1).axis("data"))
    >>> without(Piece((0,), piece.axis, 1, piece.layout), iter([False, True])).value
    (Kept(buffer=0, intervals=((3, 7),)),)
    """
    def left(node: Any) -> Any:
        if isinstance(node, Piece):
            return _piece_without(node, keep)
        return Kept(node) if next(keep) else GONE

    return tree_map(left, stored, is_leaf=lambda x: isinstance(x, Piece))


def _piece_without(piece: Piece, keep: Iterator[bool]) -> Piece:
    layout = piece.layout
    if not isinstance(layout, Flat):
        return Piece(without(piece.value, keep), piece.axis, piece.holders, layout)
    rows = [GONE if is_gone(piece.value[at]) else j for j, at in enumerate(layout.place)]
    left, spec = tree_flatten(without(tree_unflatten(layout.spec, rows), keep))         # of the leaves that are left: Kept(j, ...)
    place = [layout.place[x.buffer] for x in left]
    spans = [_in_bucket(x.intervals, *offsets(layout)[x.buffer]) for x in left]
    length = lambda span: sum(b - a for a, b in span)
    shapes = [layout.shapes[x.buffer] if x.intervals is None else (length(span),) for x, span in zip(left, spans, strict=True)]
    value, buckets, cuts = [], [], []
    for i in dict.fromkeys(place):
        found = [interval for at, span in zip(place, spans, strict=True) if at == i for interval in span]
        bounds = layout.bounds(i, piece.axis.size)
        cuts.append(tuple(sum(max(min(b, bound) - a, 0) for a, b in found) for bound in bounds))
        buckets.append(Bucket(layout.buckets[i].dtype, False, cuts[-1][-1]))
        value.append(Kept(piece.value[i], _clipped(found, *bounds[piece.axis.rank :][:2])))
    order = list(dict.fromkeys(place))
    new = Flat(spec, tuple(shapes), tuple(map(order.index, place)), tuple(buckets), tuple(cuts))
    return Piece(tuple(value), piece.axis, piece.holders, new)


def _in_bucket(intervals: tuple[tuple[int, int], ...] | None, begin: int, end: int) -> list[tuple[int, int]]:
    """Intervals of a leaf, or all of it, as intervals of its bucket."""
    return [(begin, end)] if intervals is None else [(begin + a, begin + b) for a, b in intervals]


def _clipped(intervals: list[tuple[int, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """What intervals have in common with begin to end, counted from there, those joined that touch."""
    out: list[tuple[int, int]] = []
    for a, b in intervals:
        a, b = max(a, begin) - begin, min(b, end) - begin
        if a < b:
            out[-1:] = [(out[-1][0], b)] if out and out[-1][1] == a else [*out[-1:], (a, b)]
    return tuple(out)
