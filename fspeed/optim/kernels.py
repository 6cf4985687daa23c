"""Arithmetic on flat stretches of elements that reads and writes each of them once: compiled where there are many, else in parts.

A kernel is a function of tensors of one length, which it may write over, and of a tuple of numbers; what it returns are sums.
"""
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fspeed.ops.interpret import interpreting
from fspeed.optim.moments import near
from fspeed.shard.piece import at_least_float32

BIG = 2**22         # elements from which on compiling, which takes seconds, pays
LONG = 2**23        # the same, of the shortest row, where torch has a fused kernel, a twentieth slower
LAUNCH = 2**20      # elements of a row from which on a GPU takes longer to move them than the host to launch a kernel
PART = 2**15        # elements of which a core's cache holds all tensors of an optimizer, and what is between them

Kernel = Callable[..., Any]


def ready(kernel: Kernel, rows: Iterable[Sequence[Tensor]]) -> Kernel:
    """The kernel as it is run on each of some rows, tensors of one shape, dense and laid alike: `run(row, *numbers)`.

    Cost: on a CPU, where all rows have four million elements, those of more than a part take one pass, compiled once a process.
        Others take as many as the kernel has operations, all but the first in the cache, holding a few parts of 2^15 elements.

    >>> add = lambda x, y, numbers: x.add_(y * numbers[0]).sum()
    >>> row = torch.zeros(2, 3), torch.ones(2, 3)
    >>> ready(add, [row])(row, 2.), row[0][0]
    (tensor(12.), tensor([2., 2., 2.]))
    """
    many = sum(row[0].numel() for row in rows if row[0].is_cpu) >= BIG and compiles()

    @torch.no_grad()
    def run(row: Sequence[Tensor], *numbers: Any) -> Any:
        xs = flat(row)
        if many and xs[0].is_cpu and len(xs[0]) > PART:
            return compiled(kernel)(vector(numbers, xs[0]), *xs)
        return in_parts(kernel, xs, numbers)

    return run


def triton(rows: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all rows are long ones on a GPU, or interpreted, and Triton is there: for the kernels of `fspeed.ops.optimizers`."""
    return bool(rows) and all((row[0].is_cuda or interpreting()) and row[0].numel() >= LAUNCH for row in rows) and has_triton()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def flat(row: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that are dense and laid alike, as vectors in the order of their memory."""
    return [x.as_strided((x.numel(),), (1,)) for x in row]


def in_parts(kernel: Kernel, flat: list[Tensor], numbers: tuple) -> Any:
    """The kernel run on part after part; on other devices than CPUs, on the whole."""
    part = PART if flat[0].is_cpu else len(flat[0])
    numbers = tuple(near(x, flat[0]) for x in numbers)
    sums = [kernel(*xs, numbers) for xs in zip(*(x.split(part) for x in flat), strict=True)]
    return sums[0] if len(sums) == 1 or sums[0] is None else torch.stack(sums).sum(0)


def vector(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers as a vector, so that other numbers need no other code, in the dtype that a tensor is computed in."""
    return torch.stack([torch.as_tensor(x, dtype=at_least_float32(like.dtype), device=like.device) for x in numbers])


@functools.cache
def compiled(kernel: Kernel) -> Kernel:
    return torch.compile(lambda numbers, *flat: kernel(*flat, numbers.unbind()), dynamic=True, fullgraph=True)


@functools.cache
def compiles() -> bool:
    """Whether there is what `torch.compile` needs on this machine."""
    try:
        with warnings.catch_warnings(action="ignore"):      # of torch's own modules, at their import
            torch.compile(lambda x: x + 1)(torch.zeros(2))
    except Exception:           # no compiler, or one that does not work: torch says it by many types
        return False
    return True
