"""Transformations of some leaves only."""
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.base import GradientTransformation, set_to_zero
from fspeed.optim.leaves import as_function, left, spread
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

Mask = Any | Callable[[Any], Any]


class MaskedState(NamedTuple):
    """The state of a transformation that sees some leaves only."""
    inner_state: Any


class MaskedNode(NamedTuple):
    """In place of a leaf that a transformation does not see."""


class PartitionState(NamedTuple):
    """The states of transformations that share out the leaves, by label."""
    inner_states: Any


def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Transform the leaves where a mask is True; the others' updates stay as they are.

    Args:
        inner: what transforms them. It sees `MaskedNode()` in place of the others, `()` in stored groups, where flat buffers
            have the elements of its own leaves only.
        mask: a tree of bools of the parameters' structure or of a prefix of it, or a function that makes it from them. It is
            given the plain tree on any placement, as meta tensors where parameters are stored in groups.

    Cost: on flat shards, a copy of the updates and of the parameters of leaves that do not lie side by side.

    >>> from fspeed.optim.scale import scale
    >>> opt = masked(scale(2.), {"a": True, "b": False})
    >>> params = updates = {"a": torch.tensor(1.), "b": torch.tensor(1.)}
    >>> opt.update(updates, opt.init(params))[0]
    {'a': tensor(2.), 'b': tensor(1.)}
    """
    mask = as_function(mask)

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(only(params, spread(mask, params))))

    def update(updates: Any, state: MaskedState, params: Any = None) -> tuple[Any, MaskedState]:
        keep = spread(mask, updates)
        seen = None if params is None else only(params, keep)
        new, inner_state = inner.update(only(updates, keep), state.inner_state, seen)
        return chosen(new, updates, keep), MaskedState(inner_state)

    return GradientTransformation(init, update)


def partition(transforms: Mapping[Hashable, GradientTransformation], param_labels: Any) -> GradientTransformation:
    """Transform each leaf by the transformation of its label.

    Args:
        transforms: {label: transformation}.
        param_labels: a tree of labels of the parameters' structure or of a prefix of it, or a function that makes it from them,
            as the mask of `masked`.

    Returns:
        A transformation whose state is `PartitionState({label: MaskedState(...)})`.

    Raises:
        ValueError: a leaf has a label that no transformation has.

    Cost: as for `masked`, for each transformation.

    >>> from fspeed.optim.scale import scale
    >>> opt = partition({"slow": scale(.5), "still": set_to_zero()}, {"a": "slow", "b": "still"})
    >>> params = updates = {"a": torch.tensor(1.), "b": torch.tensor(1.)}
    >>> opt.update(updates, opt.init(params))[0]
    {'a': tensor(0.5000), 'b': tensor(0.)}
    """
    labels = as_function(param_labels)

    def labelled(label: Hashable) -> Mask:
        return lambda tree: tree_map(lambda x: x == label, labels(tree))

    parts_of = {label: masked(t, labelled(label)) for label, t in transforms.items()}

    def init(params: Any) -> PartitionState:
        unknown = set(spread(labels, params)) - set(transforms)
        if unknown:
            raise ValueError(f"partition: no transformation is labelled {sorted(map(repr, unknown))}; there are {list(transforms)}")
        return PartitionState({label: t.init(params) for label, t in parts_of.items()})

    def update(updates: Any, state: PartitionState, params: Any = None) -> tuple[Any, PartitionState]:
        new = {}
        for label, t in parts_of.items():
            updates, new[label] = t.update(updates, state.inner_states[label], params)
        return updates, PartitionState(new)

    return GradientTransformation(init, update)


multi_transform = partition


def freeze(mask: Mask) -> GradientTransformation:
    """Make the updates of some leaves zero.

    Args:
        mask: which, as for `masked`.

    >>> opt = freeze({"a": True, "b": False})
    >>> params = updates = {"a": torch.tensor(1.), "b": torch.tensor(1.)}
    >>> opt.update(updates, opt.init(params))[0]
    {'a': tensor(0.), 'b': tensor(1.)}
    """
    return masked(set_to_zero(), mask)


def only(tree: Any, keep: Sequence[bool]) -> Any:
    """The tree as the transformation of the kept leaves sees it."""
    spec, kept = left(tree_structure(tree), tuple(keep), MaskedNode())
    leaves = tree_leaves(tree)
    return tree_unflatten(spec, [_taken(leaves[k.buffer], k.intervals) for k in kept])


def chosen(new: Any, old: Any, keep: Sequence[bool]) -> Any:
    """The leaves of `new`, which `only` left, and in place of the others those of `old`."""
    leaves, spec = tree_flatten(old)
    for k, x in zip(left(spec, tuple(keep), MaskedNode())[1], tree_leaves(new), strict=True):
        leaves[k.buffer] = _filled(leaves[k.buffer], x, k.intervals)
    return tree_unflatten(spec, leaves)


def _taken(x: Tensor, intervals: tuple | None) -> Tensor:
    """The elements of a flat buffer in intervals, or all of a leaf."""
    if intervals is None:
        return x
    some = [x[a:b] for a, b in intervals]
    return torch.cat(some) if len(some) > 1 else some[0] if some else x[:0]


def _filled(x: Tensor, new: Tensor, intervals: tuple | None) -> Tensor:
    """The flat buffer with other elements in intervals, or another leaf."""
    if intervals is None:
        return new
    out, at, used = [], 0, 0
    for a, b in intervals:
        out += [x[at:a], new[used : used + b - a]]
        at, used = b, used + b - a
    return torch.cat([*out, x[at:]])
