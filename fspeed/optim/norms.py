"""Norms of trees and of their leaves, right on any placement: what several ranks hold counts once."""
import functools
from typing import Any

import torch
from torch import Tensor

from fspeed.optim.leaves import pieces
from fspeed.shard.collectives import psum
from fspeed.shard.piece import at_least_float32
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
    found = [(x, holders) for holders, (x,) in pieces(lambda leaf: leaf.holders, updates)]
    if not found:
        return summed(torch.zeros(()), updates).sqrt()
    squares = torch.stack([norm(x).square() / holders for x, holders in found])
    return safe_sqrt(summed(squares.sum(), updates))


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=at_least_float32(x.dtype))


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root, whose gradient at zero is zero."""
    return torch.where(x == 0, 0, torch.where(x == 0, 1, x).sqrt())


def summed(x: Tensor, tree: Any) -> Tensor:
    """What each rank has of a sum, summed over the axes that the tree is spread over."""
    return functools.reduce(psum, tree.axes, x) if isinstance(tree, Groups) else x
