"""Pytrees: one registration for optree, torch and JAX, and the tree functions used everywhere."""
import functools
import sys
from collections.abc import Callable
from typing import Any

import optree
import torch.utils._pytree as torch_pytree

NAMESPACE = "fspeed"
VIEWS = ("fspeed.live", "fspeed.kept", "fspeed.seen")       # the same trees with other leaves; see `piece.Frozen`

tree_map: Callable[..., Any] = functools.partial(optree.tree_map, namespace=NAMESPACE)
tree_leaves: Callable[..., list] = functools.partial(optree.tree_leaves, namespace=NAMESPACE)
tree_flatten: Callable[..., tuple[list, Any]] = functools.partial(optree.tree_flatten, namespace=NAMESPACE)
tree_structure: Callable[..., Any] = functools.partial(optree.tree_structure, namespace=NAMESPACE)
tree_unflatten: Callable[..., Any] = optree.tree_unflatten

_jax_nodes: list[tuple] = []


def tree_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The path of each leaf, its keys joined by "/".

    Args:
        tree: any pytree.
        is_leaf: what to take as a leaf though it has children.

    Returns:
        One string a leaf, in the order of `tree_leaves`.

    >>> tree_paths({"w": 1, "blocks": [{"b": 2}]})
    ['blocks/0/b', 'w']
    """
    paths = optree.tree_paths(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    return ["/".join(map(str, path)) for path in paths]


def register(cls: type, children: tuple[str, ...], static: tuple[str, ...] = (), views: tuple[str, ...] = VIEWS) -> type:
    """Make a class a pytree node for optree, torch and, once it is imported, JAX.

    Args:
        cls: a class whose constructor takes `children` and `static` by keyword.
        children: names of the attributes that are subtrees.
        static: names of the attributes that are part of the structure; they must compare by `==` and be hashable.
        views: optree's namespaces, beside fspeed's own, in which it is the same node.

    Returns:
        cls.

    >>> class Point:
    ...     def __init__(self, x, unit): self.x, self.unit = x, unit
    >>> _ = register(Point, ("x",), ("unit",))
    >>> tree_map(lambda x: x + 1, Point(1, "cm")).x
    2
    """
    def flatten(node):
        return tuple(getattr(node, n) for n in children), tuple(getattr(node, n) for n in static)

    def unflatten(aux, values):
        node = object.__new__(cls)
        for name, value in zip((*children, *static), (*values, *aux), strict=True):
            object.__setattr__(node, name, value)
        return node

    for space in (NAMESPACE, *views):
        optree.register_pytree_node(
            cls, lambda n: (*flatten(n), children), unflatten, path_entry_type=optree.GetAttrEntry, namespace=space
        )
    torch_pytree.register_pytree_node(
        cls, lambda n: (list(flatten(n)[0]), flatten(n)[1]), lambda values, aux: unflatten(aux, values),
        flatten_with_keys_fn=lambda n: (
            [(torch_pytree.GetAttrKey(k), v) for k, v in zip(children, flatten(n)[0], strict=True)], flatten(n)[1]
        ),
    )
    _jax_nodes.append((cls, flatten, unflatten))
    if "jax" in sys.modules:
        register_with_jax()
    return cls


def register_with_jax() -> None:
    """Register with JAX every node that it does not know yet; JAX must be installed."""
    import jax.tree_util

    while _jax_nodes:
        cls, flatten, unflatten = _jax_nodes.pop()
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
