"""Leaves kept as slices along a dim, those that are named; the others whole, their gradients summed over the axis."""
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fspeed.opened import Later
from fspeed.shard.mesh import Axis
from fspeed.shard.piece import LIVE, Frozen, Piece, Tied, cut_slice, live, live_form
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_unflatten
from fspeed.step import Step, at_each_use, inside, over
from fspeed.transforms._sums import summed
from fspeed.tree import ROOT, matches

Spec = tuple[str | None, ...]


@dataclass(frozen=True)
class Slices:
    """How a group comes to be stored: `rule(name, group)`, each leaf cut along the dim that its spec gives the axis."""
    who: str
    axis: Axis
    specs: tuple[tuple[str, Spec], ...]

    def __call__(self, name: str, group: Any) -> Any:
        prefix = "" if name == ROOT else f"{name}/"
        leaf = lambda x: isinstance(x, (Piece, Frozen, Tied))
        leaves, spec = tree_flatten(group, is_leaf=leaf)
        paths = [(prefix + path).rstrip("/") for path in tree_paths(group, is_leaf=leaf)]
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, Tied) and self.spec(path)[1] != self.spec(paths[x.at])[1]:
                pair = f"{paths[x.at]!r} and {path!r}"
                raise ValueError(f"{self.who}: {pair} are one leaf, but have different specs; give both the same")
        return tree_unflatten(spec, map(self.cut, paths, leaves))

    def spec(self, path: str) -> tuple[Spec, int | None]:
        """A leaf's spec, and the dim that the axis divides."""
        spec = next((spec for pattern, spec in self.specs if matches(pattern, path)), ())
        return spec, spec.index(self.axis.name) if self.axis.name in spec else None

    def cut(self, path: str, x: Any) -> Any:
        spec, dim = self.spec(path)
        if dim is None or not tree_leaves(x):
            return x
        shape = tuple(tree_leaves(x)[0].shape)
        if len(spec) > len(shape):
            raise ValueError(f"{self.who}: the spec {spec} of {path!r} has {len(spec)} dims, the leaf has the shape {shape}")
        if shape[dim] % self.axis.size:
            raise ValueError(
                f"{self.who}: the {self.axis.size} ranks of axis {self.axis.name!r} do not divide dim {dim} of {path!r}, of shape "
                f"{shape}; pad it, or choose another dim"
            )
        return cut_slice(x, self.axis, dim)

    def refuse_idle(self, paths: list[str]) -> None:
        """Raise if a pattern matches no leaf."""
        for pattern, _ in self.specs:
            if not any(matches(pattern, path) for path in paths):
                some = ", ".join(map(repr, paths[:8])) + " ..." * (len(paths) > 8)
                raise ValueError(f"{self.who}: the spec for {pattern!r} names no leaf of params; there are {some}")


def sliced(step: Step, who: str, axis: Axis, specs: Mapping[str, Spec]) -> Step:
    """The step with named leaves kept as slices over an axis; its loss sees this rank's slices.

    It stands inside all other transforms, since it goes by the names of leaves: others flatten what it has cut.
    """
    rule = Slices(who, axis, tuple(specs.items()))
    label = f"slices over {axis.name!r} ({axis.size})"
    wrap = lambda inner: lambda loss, state, batch: at_each_use(view(axis, loss.reduce))(inner)(loss, state, batch)
    return inside(step, wrap, place=((label, rule), *step.place), axes=over(step, axis))


def view(axis: Axis, dtype: Any):
    """The view of a group that opens its slices, and sums over the axis the gradients of what is whole."""
    mine = lambda x: isinstance(x, Piece) and x.axis == axis

    def view(name: str, stored: Any):
        usable = tree_map(lambda x: x.value if mine(x) else x, stored, is_leaf=mine)
        nodes = tree_leaves(stored, is_leaf=mine, namespace=LIVE)
        cut = [mine(node) for node in nodes for _ in live(node)]
        form = live_form(stored)

        def pull(grads: Any) -> Any:
            leaves = live(grads)
            whole = summed([g for g, here in zip(leaves, cut, strict=True) if not here], axis, dtype)
            put = lambda sums: form(g if here else next(sums) for g, here in zip(leaves, cut, strict=True))
            return Later(lambda: put(iter(whole.wait()))) if isinstance(whole, Later) else put(iter(whole))

        return usable, pull

    return view
