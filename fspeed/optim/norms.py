"""Norms of trees and of their leaves, right on any placement: what several ranks hold counts once."""
import functools
import math
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func
from fspeed.optim.leaves import HOLDERS, Leaf, pieces
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
    squares = [x.sum() for _, x in _squares(updates)]
    return safe_sqrt(summed(torch.stack(squares).sum() if squares else torch.zeros(()), updates))


def _squares(tree: Any) -> list[tuple[list[int], Tensor]]:
    """What this rank has of the squared norms of leaves: (the leaves' numbers, their shares), for each number of holders."""
    found: dict[int, tuple[list[int], list[Tensor]]] = {}
    for leaf, (x,) in pieces(_itself, tree):
        numbers, xs = found.setdefault(leaf.holders, ([], []))
        numbers.append(leaf.number)
        xs.append(x)
    return [(numbers, torch.stack(norms(xs)).square() / holders) for holders, (numbers, xs) in found.items()]


def _itself(leaf: Leaf) -> Leaf:
    return leaf


def norms(xs: list[Tensor]) -> list[Tensor]:
    """The norm of each of some tensors, in at least float32."""
    if in_torch_func() or len({x.dtype for x in xs}) > 1:
        return [torch.linalg.vector_norm(x, dtype=at_least_float32(x.dtype)) for x in xs]
    return list(torch._foreach_norm(xs, 2, at_least_float32(xs[0].dtype)))


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
    mine: list[Any] = [None] * len(leaf_sizes(tree))
    for numbers, shares in _squares(tree):
        for i, share in zip(numbers, shares.unbind(), strict=True):
            mine[i] = share if mine[i] is None else mine[i] + share
    zero = next((torch.zeros_like(x) for x in mine if x is not None), torch.zeros(()))
    return torch.stack([zero if x is None else x for x in mine]) if mine else zero.expand(0)


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
    good = [(x.abs() < math.inf).all() for x in tree_leaves(tree)]
    bad = torch.stack(good).all().logical_not().to(torch.float32) if good else torch.zeros(())
    return summed(bad, tree) == 0


def sum_of_products(a: Any, b: Any) -> Tensor:
    """The inner product of two trees that are stored alike, the same on every rank."""
    found = [(x * y).sum(dtype=at_least_float32(x.dtype)) / n for n, (x, y) in pieces(HOLDERS, a, b)]
    return summed(torch.stack(found).sum() if found else torch.zeros(()), a)
