"""What a rank keeps of a value: a flat shard of a group of leaves, a slice of one leaf, or a group that other ranks have."""
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .collectives import all_gather, reduce_scatter
from .mesh import Axis
from .pytree import VIEWS, register, tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten
from .wire import start_all_gather, start_reduce_scatter

Start = Callable[[Tensor, Axis], Callable[[], Tensor]]      # starts a collective; what it returns waits for the result

ALIGN = 16      # elements: shards start where 128-bit loads can


class Frozen:
    """A leaf that is never differentiated: frozen by the user, or not of a floating or complex dtype. A node with one child."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return f"Frozen({self.value!r})"


class Tied:
    """A leaf that is the same as another of its group, the `at`-th of all. A node without children."""

    def __init__(self, at: int):
        self.at = at

    def __repr__(self) -> str:
        return f"Tied({self.at})"


class Stage(NamedTuple):
    """Which ranks of an axis keep a group, the same on each."""
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Absent:
    """A group that other ranks of an axis have, as `layout` says. A node without children."""
    axis: Axis | None = None
    layout: Stage | None = None


class Piece:
    """What this rank keeps of a value that an axis divides.

    Args:
        value: what is kept: a tuple of flat buffers, or a slice. The node's child.
        axis: the mesh axis.
        holders: how many ranks of the axis keep the same.
        layout: how to rebuild the whole: a `Flat`, the dim of a slice, or a `Stage` that says who has the same.
    """

    def __init__(self, value: Any, axis: Axis, holders: int, layout: Any):
        self.value, self.axis, self.holders, self.layout = value, axis, holders, layout

    def __repr__(self) -> str:
        return f"Piece({self.value!r}, axis={self.axis.name!r} {self.axis.rank}/{self.axis.size})"


GONE = ()       # in gradients and moments, in the place of a frozen leaf: no leaf to optree, torch and JAX alike, as None is not

# A frozen leaf: no leaf, and gone from what is rebuilt; no leaf, and kept; or a leaf like all others, beside tied ones.
LIVE, KEPT, SEEN = VIEWS
register(Frozen, ("value",), views=())
register(Tied, (), ("at",), views=(LIVE, KEPT))
node: Any = optree.register_pytree_node
node(Frozen, lambda x: ((), None), lambda _, none: GONE, namespace=LIVE)
node(Frozen, lambda x: ((), x), lambda x, none: x, namespace=KEPT)
node(Frozen, lambda x: ((x.value,), None), lambda _, one: one[0], namespace=SEEN)
register(Absent, (), ("axis", "layout"))
register(Piece, ("value",), ("axis", "holders", "layout"))


def is_frozen(x: Any) -> bool:
    return isinstance(x, Frozen)


def live(tree: Any) -> list:
    """The leaves of a tree that are differentiated: those outside `Frozen`."""
    return tree_leaves(tree, namespace=LIVE)


def first_live(tree: Any) -> Any:
    """The first of the live leaves, looked for no further; None if there is none."""
    return next(iter(optree.tree_iter(tree, namespace=LIVE)), None)


def replace_live(tree: Any, values: Iterable) -> Any:
    """The tree with other live leaves; frozen ones stay."""
    return tree_unflatten(tree_structure(tree, namespace=KEPT), values)


def is_gone(x: Any) -> bool:
    return x is None or (type(x) is tuple and not x)


def live_form(tree: Any) -> Callable[[Iterable], Any]:
    """A function from values of the live leaves to a tree like `tree`, with `()` for what is frozen; it holds no tensor."""
    return tree_structure(tree, namespace=LIVE).unflatten


class Parted(NamedTuple):
    """The live leaves of a tree, and what is made of other values of them."""
    leaves: list[Any]
    form: Callable[[Iterable], Any]         # a tree with `()` for what is frozen; it holds no tensor
    whole: Callable[[Iterable], Any]        # a tree with what is frozen in its place
    others: bool                            # whether anything is frozen


def parted(tree: Any) -> Parted:
    """`live`, `live_form` and `replace_live` of a tree at once: if nothing is frozen, for one look at it."""
    leaves, spec = tree_flatten(tree, namespace=LIVE)
    others = _has_frozen(spec)
    whole = tree_structure(tree, namespace=KEPT) if others else spec
    return Parted(leaves, spec.unflatten, whole.unflatten, others)


@functools.lru_cache(maxsize=256)
def _has_frozen(spec: Any) -> bool:
    seen = []
    spec.walk([None] * spec.num_leaves, lambda kind, data, children: seen.append(kind))
    return Frozen in seen


def only_live(tree: Any) -> Any:
    """The tree with `()` in place of what is frozen: the form of gradients and moments."""
    leaves, spec = tree_flatten(tree, namespace=LIVE)
    return tree_unflatten(spec, leaves)


def thaw(tree: Any) -> Any:
    """The tree as a loss sees it: without `Frozen` nodes, and with every `Tied` leaf in its place."""
    leaves, spec = tree_flatten(tree, namespace=SEEN)
    return tree_unflatten(spec, [leaves[x.at] if isinstance(x, Tied) else x for x in leaves])


# ---------------------------------------------------------------- flat shards
class Bucket(NamedTuple):
    """One contiguous buffer of a flat group: its dtype, whether it is frozen, and its elements without padding."""
    dtype: torch.dtype
    frozen: bool
    numel: int

    def padded(self, size: int) -> int:
        return -(-self.numel // (size * ALIGN)) * size * ALIGN


@dataclass(frozen=True)
class Flat:
    """How a group of leaves lies in flat buffers, one for each dtype and kind, in the order of its leaves."""
    spec: Any
    shapes: tuple[tuple[int, ...], ...]
    place: tuple[int, ...]                  # of each leaf: its bucket
    buckets: tuple[Bucket, ...]
    cuts: tuple[tuple[int, ...], ...] | None = None     # of each bucket: where ranks' parts begin, and the end; None: equal parts

    def bounds(self, bucket: int, size: int) -> tuple[int, ...]:
        """Where the part of each of `size` ranks begins in a bucket, and where the last ends."""
        if self.cuts is not None:
            return self.cuts[bucket]
        padded = self.buckets[bucket].padded(size)
        return tuple(rank * (padded // size) for rank in range(size + 1))


def flat_layout(group: Any) -> tuple[list[Tensor], Flat]:
    """The leaves of a group and how they lie when flat.

    >>> leaves, layout = flat_layout({"b": torch.zeros(3), "n": Frozen(torch.tensor(1)), "w": torch.zeros(2, 2)})
    >>> [(str(b.dtype), b.frozen, b.numel) for b in layout.buckets]
    [('torch.float32', False, 7), ('torch.int64', True, 1)]
    """
    nodes, spec = tree_flatten(group, is_leaf=is_frozen)
    leaves = [x.value if is_frozen(x) else x for x in nodes]
    kinds = [(x.dtype, is_frozen(n)) for x, n in zip(leaves, nodes, strict=True)]
    order = list(dict.fromkeys(kinds))
    numel = {k: sum(x.numel() for x, kind in zip(leaves, kinds, strict=True) if kind == k) for k in order}
    buckets = tuple(Bucket(*k, numel[k]) for k in order)
    return leaves, Flat(spec, tuple(tuple(x.shape) for x in leaves), tuple(map(order.index, kinds)), buckets)


def shard(group: Any, axis: Axis) -> Piece:
    """This rank's flat shard of a group.

    Args:
        group: a pytree of tensors, `Frozen` tensors and `Piece`s, the same on every rank of the axis.
        axis: the mesh axis that divides it.

    Returns:
        A `Piece` whose value is a tuple of 1-d buffers, one for each dtype and kind: the `axis.rank`-th of `axis.size`
        equal parts of all leaves laid end to end and padded to a multiple of 16 elements a rank.

    Cost: no communication; one copy of 1/N of the group beside the group.

    >>> from fspeed.shard.mesh import mesh
    >>> p = shard({"w": torch.arange(5.)}, mesh(data=1).axis("data"))
    >>> p.value[0].shape, gather(p)["w"]
    (torch.Size([16]), tensor([0., 1., 2., 3., 4.]))
    """
    leaves, layout = flat_layout(group)
    parts = [part.clone() for part in (_own(b, _members(leaves, layout, i), axis) for i, b in enumerate(layout.buckets))]
    return Piece(tuple(Frozen(x) if b.frozen else x for x, b in zip(parts, layout.buckets, strict=True)), axis, 1, layout)


def _members(leaves: list, layout: Flat, bucket: int) -> list:
    return [x for x, at in zip(leaves, layout.place, strict=True) if at == bucket]


def _own(bucket: Bucket, leaves: list[Tensor], axis: Axis) -> Tensor:
    """This rank's part of leaves laid end to end, touching no other part."""
    size = bucket.padded(axis.size) // axis.size
    first, last, at, parts = axis.rank * size, (axis.rank + 1) * size, 0, []
    for x in leaves:
        begin, end = max(first - at, 0), min(last - at, x.numel())
        if begin < end:
            parts.append(x.reshape(-1)[begin:end])
        at += x.numel()
    pad = size - sum(map(len, parts))
    like = leaves[0] if leaves else torch.empty(0, dtype=bucket.dtype)
    return torch.cat([*parts, like.new_zeros(pad)])


def pack(leaves: list[Tensor], bucket: Bucket, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Leaves laid end to end, padded to `size` equal aligned parts: (padded,)."""
    flat = [x.reshape(-1) for x in leaves]
    pad = bucket.padded(size) - bucket.numel
    flat = [*flat, flat[0].new_zeros(pad)] if pad else flat
    return torch.cat(flat if dtype is None else [x.to(dtype) for x in flat])


def unpack(buffers: Iterable[Any], layout: Flat) -> Any:
    """The group whose leaves lie in whole flat buffers, `()` where a buffer is; views, no copy."""
    split: list[Iterator[Any]] = []
    for i, (buffer, bucket) in enumerate(zip(buffers, layout.buckets, strict=True)):
        shapes = _members(list(layout.shapes), layout, i)
        if is_gone(buffer):
            split.append(iter([GONE for _ in shapes]))
            continue
        leaves = buffer[: bucket.numel].split([math.prod(s) for s in shapes])
        views: list[Any] = [x.view(s) for x, s in zip(leaves, shapes, strict=True)]
        split.append(iter([Frozen(x) for x in views] if bucket.frozen else views))
    return tree_unflatten(layout.spec, [next(split[at]) for at in layout.place])


def cut_slice(value: Any, axis: Axis, dim: int) -> Piece:
    """This rank's slice of a leaf, or of what is kept of it, along a dim that the axis divides.

    >>> from fspeed.shard.mesh import mesh
    >>> cut_slice(torch.ones(2, 3), mesh(data=1).axis("data"), 1).value.shape
    torch.Size([2, 3])
    """
    return Piece(tree_map(lambda x: x.chunk(axis.size, dim)[axis.rank].clone(), value), axis, 1, dim)


def join_slices(piece: Piece) -> Any:
    """The leaf, or what is kept of it, of which `piece` is a slice, on every rank; one all-gather a slice."""
    return tree_map(lambda x: all_gather(x, piece.axis, dim=piece.layout), piece.value)


def gather(piece: Piece) -> Any:
    """The whole group of which `piece` is a flat shard, on every rank.

    Cost: (N-1)/N of the group's bytes sent by each rank, one all-gather a buffer; its leaves are views of the buffers.
    """
    return _start_gather(piece, lambda x, axis: partial(all_gather, x, axis))()


def start_gather(piece: Piece) -> Callable[[], Any]:
    """Start to `gather`, where nobody differentiates: a function that waits for the group, to be called once.

    >>> from fspeed.shard.mesh import mesh
    >>> finish = start_gather(shard({"w": torch.arange(5.)}, mesh(data=1).axis("data")))
    >>> finish()["w"]
    tensor([0., 1., 2., 3., 4.])
    """
    return _start_gather(piece, lambda x, axis: start_all_gather(x, axis).wait)


def _start_gather(piece: Piece, start: Start) -> Callable[[], Any]:
    layout, bounds = piece.layout, [piece.layout.bounds(i, piece.axis.size) for i in range(len(piece.value))]
    values = [x.value if is_frozen(x) else x for x in piece.value]
    finish = [_gathered(x, b, piece.axis, start) for x, b in zip(values, bounds, strict=True)]
    return lambda: unpack([wait() for wait in finish], layout)


def _gathered(x: Any, bounds: tuple[int, ...], axis: Axis, start: Start) -> Callable[[], Any]:
    if is_gone(x):
        return lambda: GONE
    if x.is_complex():
        pairs = _gathered(torch.view_as_real(x), bounds, axis, start)
        return lambda: torch.view_as_complex(pairs())
    if not bounds[-1]:
        return lambda: x
    sizes = [stop - start for start, stop in pairwise(bounds)]
    if min(sizes) == max(sizes):
        return start(x, axis)
    wait, largest = start(torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])]), axis), max(sizes)
    return lambda: torch.cat([part[:size] for part, size in zip(wait().split(largest), sizes, strict=True)])


def scatter(grads: Any, piece: Piece, dtype: torch.dtype | None = None) -> Piece:
    """The transpose of `gather`: gradients of the whole group, summed over the axis, and this rank's shard of the sum.

    Args:
        grads: gradients as `only_live` forms them, this rank's.
        piece: what was gathered; only its layout is used.
        dtype: what to send and sum in; by default float32 for shorter floats, else each gradient's own.

    Cost: (N-1)/N of the gradients' bytes sent by each rank, one reduce-scatter a live buffer.
    """
    return _start_scatter(grads, piece, dtype, lambda x, axis: partial(reduce_scatter, x, axis))()


def start_scatter(grads: Any, piece: Piece, dtype: torch.dtype | None = None) -> Callable[[], Piece]:
    """Start to `scatter`, where nobody differentiates: a function that waits for the shard, to be called once.

    >>> from fspeed.shard.mesh import mesh
    >>> piece = shard({"w": torch.arange(5.)}, mesh(data=1).axis("data"))
    >>> start_scatter({"w": torch.ones(5)}, piece)().value[0][:6]
    tensor([1., 1., 1., 1., 1., 0.])
    """
    return _start_scatter(grads, piece, dtype, lambda x, axis: start_reduce_scatter(x, axis).wait)


def _start_scatter(grads: Any, piece: Piece, dtype: torch.dtype | None, start: Start) -> Callable[[], Piece]:
    axis, layout, leaves = piece.axis, piece.layout, iter(tree_leaves(grads))
    per_leaf = [None if layout.buckets[at].frozen else next(leaves) for at in layout.place]
    finish: list[Callable[[], Any]] = []
    for i, bucket in enumerate(layout.buckets):
        mine = _members(per_leaf, layout, i)
        finish.append((lambda: GONE) if bucket.frozen else _scattered(mine, bucket, axis, dtype, start))
    return lambda: Piece(tuple(wait() for wait in finish), axis, 1, layout)


def _scattered(leaves: list[Tensor], bucket: Bucket, axis: Axis, dtype: torch.dtype | None, start: Start) -> Callable[[], Tensor]:
    if not bucket.numel:
        empty = leaves[0].reshape(-1)
        return lambda: empty
    flat = pack(leaves, bucket, axis.size, dtype or at_least_float32(leaves[0].dtype))
    if flat.is_complex():
        pairs = start(torch.view_as_real(flat), axis)
        return lambda: torch.view_as_complex(pairs())
    return start(flat, axis)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are summed."""
    return torch.float32 if dtype.itemsize < 4 else dtype
