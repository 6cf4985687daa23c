"""Norms of trees and of their leaves, right on any placement: what several ranks hold counts once."""
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func
from fspeed.optim.leaves import HOLDERS, LEAF, pieces
from fspeed.shard.collectives import psum
from fspeed.shard.piece import at_least_float32
from fspeed.shard.pytree import tree_leaves
from fspeed.tree import Groups


def global_norm(updates: Any) -> Tensor:
    """The Euclidean norm of all elements of a tree.

        sqrt(sum |x|^2)

    Args:
        updates: a pytree of tensors, plain, or as a step stores it: then each element's square is divided by the number of
            ranks that hold it, and summed over the mesh.

    Returns:
        A 0-d tensor, the same on every rank, in at least float32. Its gradient at zero is zero.

    Cost: one read of the tree, and one number summed over each mesh axis.

    >>> global_norm({"b": torch.tensor(3.), "w": torch.tensor([4.])})
    tensor(5.)
    """
    found = [(holders, x, None) for holders, (x,) in pieces(HOLDERS, updates)]
    return safe_sqrt(summed(together([squares.sum() for _, squares in _squares(found)]).sum(), updates))


def _squares(found: list[tuple[int, Tensor, Any]]) -> list[tuple[list, Tensor]]:
    """(keys, squared norms over holders) of (holders, tensor, key)s: a vector for each number of holders and device."""
    alike: dict[Any, tuple[list, list[Tensor]]] = {}
    for holders, x, key in found:
        keys, xs = alike.setdefault((holders, x.device), ([], []))
        keys.append(key)
        xs.append(x)
    return [(keys, norms(xs).square() / holders) for (holders, _), (keys, xs) in alike.items()]


def norms(xs: Sequence[Tensor]) -> Tensor:
    """The norms of tensors on one device, in at least float32: (tensors,)."""
    if in_torch_func() or len({x.dtype for x in xs}) > 1:
        return torch.stack([torch.linalg.vector_norm(x, dtype=at_least_float32(x.dtype)) for x in xs])
    return torch.stack(torch._foreach_norm(list(xs), 2, at_least_float32(xs[0].dtype)))


def together(xs: Sequence[Tensor]) -> Tensor:
    """0-d tensors as one, where the first is: (tensors,)."""
    return torch.stack([x.to(xs[0].device) for x in xs]) if xs else torch.zeros(0)


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root, whose gradient at zero is zero."""
    return torch.where(x == 0, 0, torch.where(x == 0, 1, x).sqrt())


def summed(x: Tensor, tree: Any) -> Tensor:
    """What each rank has of a sum, summed over the axes that the tree is spread over."""
    return functools.reduce(psum, tree.axes, x) if isinstance(tree, Groups) else x


# ---------------------------------------------------------------- of single leaves
def leaf_norms(*trees: Any) -> Tensor:
    """The Euclidean norms of the whole leaves: (trees, leaves), the same on every rank.

    Cost: one read of the trees, and that many numbers summed over each mesh axis.

    >>> leaf_norms({"a": torch.tensor([3., 4.]), "b": torch.tensor(2.)})
    tensor([[5., 2.]])
    """
    return safe_sqrt(summed(torch.stack([_by_leaf(tree) for tree in trees]), trees[0]))


def _by_leaf(tree: Any) -> Tensor:
    """What this rank has of the square of each leaf's norm."""
    mine: dict[int, Tensor] = {}
    for numbers, squares in _squares([(leaf.holders, x, leaf.number) for leaf, (x,) in pieces(LEAF, tree)]):
        for i, x in zip(numbers, squares.unbind(), strict=True):
            mine[i] = mine[i] + x if i in mine else x
    zero = next((torch.zeros_like(x) for x in mine.values()), torch.zeros(()))
    return together([mine.get(i, zero) for i in range(len(leaf_sizes(tree)))])


def leaf_rms(*trees: Any) -> Tensor:
    """The root mean squares of the whole leaves: (trees, leaves), the same on every rank; 0 for an empty leaf."""
    sizes = leaf_sizes(trees[0])
    norms = leaf_norms(*trees)
    return torch.stack([x / max(n, 1) ** 0.5 for x, n in zip(norms.unbind(1), sizes, strict=True)], 1) if sizes else norms


def leaf_sizes(tree: Any) -> list[int]:
    """How many elements each whole leaf has."""
    if isinstance(tree, Groups):
        return [math.prod(leaf.shape) for infos in tree.skeleton.leaves for leaf in infos]
    return [x.numel() for x in tree_leaves(tree)]


def all_finite(tree: Any) -> Tensor:
    """Whether every element on every rank is finite: bool, 0-d."""
    good = together([(x.abs() < math.inf).all() for x in tree_leaves(tree)])
    return summed(good.all().logical_not().to(torch.float32), tree) == 0
