"""Arithmetic on flat stretches of elements that reads and writes each of them once: compiled where there are many, else in parts.

A kernel is a function of tensors of one length, which it may write over, and of a vector of numbers; what it returns are sums.
"""
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fspeed.shard.piece import at_least_float32

BIG = 2**20         # elements from which on compiling, which takes seconds, pays
PART = 2**17        # elements that a core's cache holds, of all tensors of an optimizer


def over(kernel: Callable[..., Any], row: Sequence[Tensor], *numbers: Any) -> Any:
    """kernel(*row, numbers) on tensors of one shape, dense and laid alike; its sums, or None.

    Cost: on a CPU, from a million elements on, one pass, compiled once a process; below, as many as the kernel has operations, but
    all but the first in the cache. Beside the tensors a few parts of 2^17 elements are held.

    >>> add = lambda x, y, numbers: x.add_(y * numbers[0]).sum()
    >>> x = torch.zeros(2, 3)
    >>> over(add, (x, torch.ones(2, 3)), 2.), x[0]
    (tensor(12.), tensor([2., 2., 2.]))
    """
    first = row[0]
    flat = [x.as_strided((x.numel(),), (1,)) for x in row]
    given = vector(numbers, first)
    with torch.no_grad():
        if first.is_cpu and first.numel() >= BIG and compiles():
            return compiled(kernel)(*flat, given)
        part = PART if first.is_cpu else first.numel()
        parts = [kernel(*xs, given) for xs in zip(*(x.split(part) for x in flat), strict=True)]
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.stack(parts).sum(0)


def vector(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers, and 0-d tensors, as a vector on a tensor's device, in the dtype that it is computed in."""
    dtype, device = at_least_float32(like.dtype), like.device
    if not any(isinstance(x, Tensor) for x in numbers):
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in numbers])


@functools.cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, dynamic=True, fullgraph=True)


@functools.cache
def compiles() -> bool:
    """Whether there is what `torch.compile` needs on this machine."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2))
    except Exception:           # no compiler, or one that does not work: torch says it by many types
        return False
    return True
