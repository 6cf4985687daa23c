"""Parameter trees cut into named groups: one for each layer, and the root for all that is in no layer."""
from __future__ import annotations

import fnmatch
import functools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace
from fspeed.ops.sparse.layout import Blocks, Layout
from fspeed.shard.collectives import all_gather
from fspeed.shard.mesh import Axis
from fspeed.shard.messages import receive, send_all
from fspeed.shard.piece import Absent, Flat, Frozen, Piece, Stage, Tied, gather, join_slices, thaw
from fspeed.shard.pytree import NAMESPACE, register, tree_flatten, tree_leaves, tree_map, tree_paths, tree_unflatten

ROOT = "root"
Group = Any                                             # a subtree: what transforms act on
Place = tuple[str, Any]                                 # in words, and (name, group) -> stored group, or `BySizes`


class BySizes:
    """A placement that has to know how many elements every group has: of(sizes) is (name, group) -> stored group."""

    def __init__(self, of: Callable[[dict[str, int]], Callable[[str, Group], Group]]):
        self.of = of


class Lazy:
    """A leaf to be made by `fn(*args)`."""

    def __init__(self, fn: Callable[..., Tensor], args: tuple):
        self.fn, self.args = fn, args


def lazy(fn: Callable[..., Tensor], *args: Any) -> Any:
    """A leaf of a parameter tree that is made, by `fn(*args)`, only when its group is placed.

    With lazy leaves `step.init` never holds more than one whole group, however large the model.

    Args:
        fn: makes the tensor, the same on every rank.
        args: its arguments.

    Returns:
        What to put into the parameter tree in place of the tensor.

    >>> from fspeed.tree import cut
    >>> cut({"w": lazy(torch.zeros, 2, 3)})["root"]["w"].shape
    torch.Size([2, 3])
    """
    return Lazy(fn, args)


# ---------------------------------------------------------------- choosing by path
def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a key path: `*` stands for a key or a part of one, `**` for any number of keys.

    >>> matches("blocks/*", "blocks/0"), matches("blocks/*", "blocks/0/w"), matches("**/w", "blocks/0/w")
    (True, False, True)
    """
    def match(pattern: list[str], path: list[str]) -> bool:
        if not pattern:
            return not path
        if pattern[0] == "**":
            return match(pattern[1:], path) or (bool(path) and match(pattern, path[1:]))
        return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and match(pattern[1:], path[1:])

    return match(pattern.split("/"), path.split("/"))


@dataclass(frozen=True)
class Globs:
    """A predicate on key paths: whether any of the patterns matches."""
    patterns: tuple[str, ...] = ()

    def __call__(self, path: str) -> bool:
        return any(matches(p, path) for p in self.patterns)

    def __str__(self) -> str:
        return ", ".join(map(repr, self.patterns)) or "none"


NONE = Globs()


def chooser(which: str | Iterable[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    """A predicate on key paths, from one, a glob or several globs."""
    if callable(which):
        return which
    return Globs((which,) if isinstance(which, str) else tuple(which))


# ---------------------------------------------------------------- groups
@dataclass(frozen=True)
class Leaf:
    """What is known of a whole leaf without its values."""
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool


@dataclass(frozen=True)
class Skeleton:
    """How groups join into the whole tree. `slots`: for each leaf of `spec`, its group and, in the root, its path."""
    spec: Any = field(repr=False)
    slots: tuple[tuple[str, str | None], ...] = field(repr=False)
    specs: tuple[Any, ...] = field(repr=False)          # the structure of each group
    leaves: tuple[tuple[Leaf, ...], ...]                # the leaves of each group
    plain: frozenset[str] = frozenset()                 # the groups that have neither frozen nor tied leaves


class Groups:
    """A tree cut into named groups: parameters as they are stored, and likewise gradients and moments.

    `groups[name]` is one group; `whole(groups)` is the plain tree, gathered. A pytree node whose children are the groups.
    """
    written_over = False        # whether a step that they were donated to wrote over their memory

    def __init__(self, stored: tuple, names: tuple[str, ...], skeleton: Skeleton, axes: tuple[Axis, ...], placed: tuple[str, ...]):
        self.stored, self.names, self.skeleton, self.axes, self.placed = stored, names, skeleton, axes, placed

    def items(self) -> Iterator[tuple[str, Group]]:
        return zip(self.names, self.stored, strict=True)

    def here(self) -> Iterator[tuple[str, Group]]:
        """The groups that this rank has, whole or in part."""
        return ((name, group) for name, group in self.items() if not isinstance(group, Absent))

    def __getitem__(self, name: str) -> Group:
        if name not in self.names:
            raise KeyError(f"no group {name!r}, there are {', '.join(self.names)}; step.params(state) is the plain tree")
        return self.stored[self.names.index(name)]

    def replace(self, stored: Iterable) -> Groups:
        """The same tree of other groups."""
        return Groups(tuple(stored), self.names, self.skeleton, self.axes, self.placed)

    def map(self, f: Callable[..., Group], *others: Groups) -> Groups:
        """f(name, group, ...) of every group that is here."""
        rows = zip(self.names, self.stored, *(o.stored for o in others), strict=True)
        return self.replace(row[1] if isinstance(row[1], Absent) else f(*row) for row in rows)

    def leaves(self, name: str) -> tuple[Leaf, ...]:
        """What is known of a group's whole leaves."""
        return self.skeleton.leaves[self.names.index(name)]

    def __repr__(self) -> str:
        return f"Groups({dict(self.items())!r})"


register(Groups, ("stored",), ("names", "skeleton", "axes", "placed"))
register(Blocks, ("start", "full", "index", "mask"))
register(Layout, ("rows", "columns", "masks"), ("block", "heads", "lengths"))


def cut(
    params: Any, is_layer: Callable[[str], bool] = NONE, trainable: Callable[[str], bool] = lambda path: True,
    place: tuple[Place, ...] = (), axes: tuple[Axis, ...] = (),
) -> Groups:
    """Cut a parameter tree into its root and its layers, and place each; one whole group is held at a time.

    Args:
        params: a pytree of tensors and `lazy` leaves.
        is_layer, trainable: predicates on key paths, of subtrees and of leaves.
        place: how a group comes to be stored, innermost first. A rule that goes by paths may refuse them all at once, by a
            method `refuse_idle(paths)`.
        axes: the mesh axes that the tree is spread over.

    Raises:
        ValueError: a leaf is no tensor, no leaf is trainable, `is_layer` chooses nothing, two leaves have one path, or ranks
            of the axes have different trees or values.
    """
    _refuse_twins(params)
    for _, rule in place:
        getattr(rule, "refuse_idle", lambda paths: None)(tree_paths(params))
    layers = _layers(params, is_layer)
    first = {id(t): path for path, t in reversed(layers.items())}           # a layer used twice is stored once
    is_top = lambda x: id(x) in first
    tops, spec = tree_flatten(params, is_leaf=is_top)
    root: dict[str, Any] = {}
    slots: list[tuple[str, str | None]] = []
    for x, path in zip(tops, tree_paths(params, is_leaf=is_top), strict=True):
        if is_top(x):
            slots.append((first[id(x)], None))
        else:
            root[path] = x
            slots.append((ROOT, path))
    _refuse_ties({ROOT: root, **layers})

    stored, specs, leaves, prints, plain = [], [], [], {}, set()
    groups = {**({ROOT: root} if root else {}), **{path: t for path, t in layers.items() if first[id(t)] == path}}
    sizes = functools.cache(lambda: {name: sum(map(elements, tree_leaves(group))) for name, group in groups.items()})
    steps = [step.of(sizes()) if isinstance(step, BySizes) else step for _, step in place]
    shared = any(axis.size > 1 for axis in axes) and not in_torch_func() and not in_trace()
    for name, group in groups.items():
        prefix = "" if name == ROOT else name
        made, info = _made(group, prefix, trainable)
        specs.append(tree_flatten(group)[1])
        leaves.append(info)
        if not any(isinstance(x, (Frozen, Tied)) for x in marked_leaves(made)):
            plain.add(name)
        if shared:
            prints.update(fingerprints(made, info))
        for step in steps:
            made = made if isinstance(made, Absent) else step(name, made)
        stored.append(made)
    if not any(not leaf.frozen for info in leaves for leaf in info):
        raise ValueError(
            "params has no leaf to train: got "
            + (", ".join(f"{x.path!r} ({x.dtype})" for info in leaves for x in info) or "an empty tree")
            + "; at least one leaf must be of a floating or complex dtype and chosen by trainable="
        )
    if shared:
        _refuse_others(prints, axes)
    skeleton = Skeleton(spec, tuple(slots), tuple(specs), tuple(leaves), frozenset(plain))
    return Groups(tuple(stored), tuple(groups), skeleton, axes, tuple(label for label, _ in place))


def _layers(params: Any, is_layer: Callable[[str], bool]) -> dict[str, Any]:
    """The subtrees that are layers, by path, in natural order; a layer has no layers in it."""
    found = {}
    for accessor in optree.tree_accessors(params, namespace=NAMESPACE):
        keys = [str(e.entry) for e in accessor]
        for depth in range(1, len(keys) + 1):
            path = "/".join(keys[:depth])
            if path in found or is_layer(path):
                found[path] = accessor[:depth](params)
                break
    _refuse_idle(is_layer, params, found)
    return {path: found[path] for path in sorted(found, key=natural)}


def _refuse_idle(is_layer: Callable[[str], bool], params: Any, found: Mapping[str, Any]) -> None:
    """Raise if a pattern of layers, or a predicate, chooses nothing, or chooses what cannot be the name of a layer."""
    if ROOT in found:
        raise ValueError(f"layers= chooses {ROOT!r}, the name of the group of all that is in no layer; rename that subtree")
    keys = [path.split("/") for path in tree_paths(params)]
    paths = list(dict.fromkeys("/".join(k[:depth]) for k in keys for depth in range(1, len(k) + 1)))
    if isinstance(is_layer, Globs):
        idle: list[Any] = [p for p in is_layer.patterns if not any(matches(p, path) for path in paths)]
    else:
        idle = [] if found else [is_layer]
    if idle:
        some = ", ".join(map(repr, paths[:8])) + " ..." * (len(paths) > 8)
        raise ValueError(f"layers={idle[0]!r} matches nothing in params; there are {some or 'no leaves'}")


def _refuse_twins(params: Any) -> None:
    """Raise if two leaves have one path, as with keys 0 and "0", or "a/b" beside {"a": {"b": ...}}."""
    for path, times in Counter(tree_paths(params)).items():
        if times > 1:
            raise ValueError(f"params has {times} leaves of the path {path!r}; rename a key, so that each has a path of its own")


def natural(path: str) -> list[tuple[int, int, str]]:
    """A sorting key under which `blocks/2` comes before `blocks/10`."""
    return [(0, int(k), "") if k.isdigit() else (1, 0, k) for k in re.split("/", path)]


def _made(group: Group, prefix: str, trainable: Callable[[str], bool]) -> tuple[Group, tuple[Leaf, ...]]:
    """A group as transforms see it: lazy leaves made, what is not trained in `Frozen` nodes, a leaf that comes again `Tied`."""
    leaves, spec = tree_flatten(group)
    seen: dict[int, int] = {}
    out: list[Any] = []
    info = []
    for i, (leaf, key) in enumerate(zip(leaves, tree_paths(group), strict=True)):
        path = "/".join(k for k in (prefix, key) if k)
        x = plain(leaf.fn(*leaf.args)) if isinstance(leaf, Lazy) else copied(leaf)
        if not isinstance(x, Tensor):
            raise ValueError(f"params leaf {path!r} is a {type(x).__name__}; every leaf must be a torch.Tensor (or fs.lazy)")
        at = seen.setdefault(id(leaf), i)
        frozen = not (x.is_floating_point() or x.is_complex()) or not trainable(path)
        info.append(Leaf(path, tuple(x.shape), x.dtype, frozen))
        out.append(Tied(at) if at < i else Frozen(x) if frozen else x)
    return tree_unflatten(spec, out), tuple(info)


def marked_leaves(group: Group) -> list[Any]:
    """The leaves of a group, with those that are `Frozen` or `Tied` as such."""
    return tree_leaves(group, is_leaf=lambda x: isinstance(x, (Frozen, Tied)))


def elements(x: Any) -> int:
    """How many elements a leaf has; a lazy one is made to be counted, and dropped."""
    x = x.fn(*x.args) if isinstance(x, Lazy) else x
    return x.numel() if isinstance(x, Tensor) else 0


def copied(x: Any) -> Any:
    """A state's own copy of what it is given."""
    return plain(x).clone() if isinstance(x, Tensor) else x


def plain(x: Any) -> Any:
    """A tensor as a state has it: it does not go on tracking an `nn.Parameter`."""
    return x.detach() if isinstance(x, torch.nn.Parameter) else x


def _refuse_ties(groups: Mapping[str, Group]) -> None:
    """Raise if a tensor is in two groups: its gradient would be split between them."""
    seen: dict[int, tuple[int, str]] = {}
    for name, group in groups.items():
        for x, key in zip(tree_leaves(group), tree_paths(group), strict=True):
            path = key if name == ROOT else f"{name}/{key}"
            owner, other = seen.setdefault(id(x), (id(group), path))
            if owner != id(group):
                raise ValueError(
                    f"params leaves {other!r} and {path!r} are one tensor, but lie in different layers; "
                    "keep a tied leaf out of layers= and pass it to the layers that use it, or give each its own tensor"
                )


def fingerprints(group: Group, leaves: tuple[Leaf, ...]) -> dict[str, Tensor]:
    """{path: fingerprint} of a group's leaves that have values of their own."""
    nodes = marked_leaves(group)
    values = {leaf.path: x.value if isinstance(x, Frozen) else x for leaf, x in zip(leaves, nodes, strict=True)}
    return {path: fingerprint(x) for path, x in values.items() if isinstance(x, Tensor) and x.device.type != "meta"}


def fingerprint(x: Tensor) -> Tensor:
    """An int64 that two tensors of different values seldom share: the sum of their bits, read as whole numbers."""
    x = torch.view_as_real(x) if x.is_complex() else x
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().reshape(-1).contiguous().view(whole).sum(dtype=torch.int64)


def _refuse_others(prints: dict[str, Tensor], axes: tuple[Axis, ...]) -> None:
    """Raise if the ranks of an axis have different leaves, or a leaf has different values on them."""
    paths = zlib.crc32("/".join(prints).encode())
    for axis in axes:
        if axis.size == 1 or not prints:
            continue
        device = next(iter(prints.values())).device
        if len(set(all_gather(torch.tensor([paths], device=device), axis).tolist())) > 1:
            raise ValueError(f"the ranks of axis {axis.name!r} were given params of different leaves, here {', '.join(prints)}")
        seen = all_gather(torch.stack(list(prints.values())).unsqueeze(0), axis)
        if odd := [path for path, same in zip(prints, (seen == seen[0]).all(0).tolist(), strict=True) if not same]:
            raise ValueError(
                f"params leaf {odd[0]!r} has different values on the ranks of axis {axis.name!r}"
                + (f", and {len(odd) - 1} more" if len(odd) > 1 else "")
                + "; draw it from the same seed on every rank: torch.manual_seed(0) before, or fs.random with one key"
            )


def join(skeleton: Skeleton, usable: Mapping[str, Any]) -> Any:
    """The whole tree, from the usable root, {path: leaf}, and what stands for each layer."""
    return tree_unflatten(skeleton.spec, [usable[name] if path is None else usable[name][path] for name, path in skeleton.slots])


def whole(tree: Any) -> Any:
    """A tree with every `Groups` in it gathered into a plain tree on every rank: parameters, gradients, optimizer states.

    Args:
        tree: any pytree; what is no `Groups` stays as it is.

    Returns:
        The same tree with plain trees in place of `Groups`; `()` where a gradient or moment of a frozen leaf would be.

    Cost: one all-gather a buffer, and for what only some ranks have, one message a leaf to each other; call it on every rank.

    >>> from fspeed.tree import cut
    >>> whole({"mu": cut({"w": torch.ones(2)})})
    {'mu': {'w': tensor([1., 1.])}}
    """
    def joined(node: Any) -> Any:
        if not isinstance(node, Groups):
            return node
        return join(node.skeleton, {n: thaw(everywhere(gathered(g))) for n, g in node.items()})

    return tree_map(joined, tree, is_leaf=lambda x: isinstance(x, Groups))


def gathered(group: Group) -> Group:
    """A stored group, whole where it is: its flat shards gathered level by level, and then its slices."""
    whole = lambda piece: gather(piece) if isinstance(piece.layout, Flat) else join_slices(piece)
    while any(map(in_parts, tree_leaves(group, is_leaf=in_parts))):
        group = tree_map(lambda x: whole(x) if in_parts(x) else x, group, is_leaf=in_parts)
    return group


def in_parts(x: Any) -> bool:
    """Whether x is this rank's part of something: a flat shard or a slice, and not what a stage has whole."""
    return isinstance(x, Piece) and not isinstance(x.layout, Stage)


def everywhere(group: Group) -> Group:
    """A group that some ranks of an axis have, on all of them."""
    if isinstance(group, Absent) and group.axis is not None and group.layout is not None:
        return receive(group.axis, group.layout.owners[0])
    if not isinstance(group, Piece) or not isinstance(group.layout, Stage):
        return group
    axis, (first, *others) = group.axis, group.layout.owners
    if axis.rank == first:
        send_all([(rank, group.value) for rank in range(axis.size) if rank not in (first, *others)], axis)
    return group.value


# ---------------------------------------------------------------- values for leaves
def abstract(groups: Groups) -> Any:
    """The whole tree with meta tensors for leaves: shapes and dtypes without values, and without communication."""
    skeleton = groups.skeleton
    usable = {
        name: tree_unflatten(spec, [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves])
        for name, spec, leaves in zip(groups.names, skeleton.specs, skeleton.leaves, strict=True)
    }
    return join(skeleton, usable)


def by_group(groups: Groups, tree: Any) -> dict[str, list]:
    """For each group the values that a plain tree of the whole's structure has for its leaves, in order.

    >>> groups = cut({"blocks": [{"w": torch.ones(1)}], "b": torch.ones(1)}, chooser("blocks/*"))
    >>> by_group(groups, {"blocks": [{"w": 1}], "b": 2})
    {'root': [2], 'blocks/0': [1]}
    """
    parts = groups.skeleton.spec.flatten_up_to(tree)
    found: dict[str, Any] = {ROOT: {}}
    for (name, path), part in zip(groups.skeleton.slots, parts, strict=True):
        if path is None:
            found[name] = part
        else:
            found[ROOT][path] = part
    return {name: spec.flatten_up_to(found[name]) for name, spec in zip(groups.names, groups.skeleton.specs, strict=True)}
