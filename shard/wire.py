"""Collectives under way: started now, waited for later, not differentiable. What travels, and in what order sums are taken.

Sums over the ranks of an axis are taken in the order of the ranks, in float32 when the dtype is narrower, and rounded once. So all
ranks hold the same bits, whatever the op (psum, or reduce_scatter and all_gather) and wherever an element lies in its buffer. On
GPUs the order and the precision are NCCL's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .mesh import Axis

c10d = torch.ops._c10d_functional
# what gloo and NCCL carry; all else travels as bytes
CARRIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}


# Threads of gloo note the name of what they completed in one string, without a lock; a name of more than 15 characters lies on the
# heap, and is freed twice when two collectives complete at once. all_gather_into_tensor calls ALLGATHER_COALESCED: it must not.
cpu_kernels = torch.library.Library("_c10d_functional", "IMPL")


def all_gather_into_tensor(x: Tensor, size: int, group: str) -> Tensor:
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    numbers, place = (torch.view_as_real(x), torch.view_as_real(out)) if x.is_complex() else (x, out)
    c10d.all_gather_into_tensor_out(numbers, size, group, out=place)
    return out      # its wait is known by its storage


cpu_kernels.impl("all_gather_into_tensor", all_gather_into_tensor, "CPU")


class CollectiveError(RuntimeError):
    """A collective did not complete: a peer died, came too late, or called something else. Its axis cannot be used again."""


@dataclass(frozen=True)
class Pending:
    """A collective under way: `wait()`, once, gives its result or raises CollectiveError.

    >>> start_psum(torch.ones(3), Axis("data", 0, 0, 1, None)).wait()
    tensor([1., 1., 1.])
    """

    operation: str
    axis: Axis
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        with named_failure(self.operation, self.axis):
            return self.finish()


@contextmanager
def named_failure(operation: str, axis: Axis) -> Iterator[None]:
    """Turn what the backend raises into an error that says which collective failed, and where."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        where = f"{operation} over axis {axis.name!r} failed on its rank {axis.rank} of {axis.size}"
        raise CollectiveError(f"{where}: {str(error).splitlines()[0]}") from error


def agree(operation: str, x: Tensor, axis: Axis) -> None:
    """With torch's debug level above OFF: raise CollectiveError unless all ranks of the axis are about to call the same."""
    if dist.get_debug_level() == dist.DebugLevel.OFF or is_in_torch_dispatch_mode():
        return
    text = f"{operation} of {x.dtype} {tuple(x.shape)}"
    mine = torch.tensor(list(text.encode()[:128].ljust(128)), dtype=torch.uint8, device=x.device)
    with named_failure(operation, axis):
        said = c10d.wait_tensor(c10d.all_gather_into_tensor(mine, axis.size, axis.group)).view(axis.size, 128).tolist()
    calls = [bytes(row).decode().rstrip() for row in said]
    if len(set(calls)) > 1:
        lines = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
        raise CollectiveError(f"the ranks of axis {axis.name!r} made different calls, and none was started:\n{lines}")


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start to gather: result = concat over ranks r of x_r along dim 0.

    Args:
        x: (s, ...), any dtype, the same shape on all ranks; it must not change until the wait.
        axis: the ranks to gather from.

    Returns: a Pending of (size * s, ...).
    Raises: ValueError if x is a scalar.
    Cost: sends and receives (size - 1) * x bytes a rank.

    >>> start_all_gather(torch.arange(3), Axis("data", 0, 0, 1, None)).wait()
    tensor([0, 1, 2])
    """
    if x.ndim == 0:
        raise ValueError("all_gather concatenates along a dim, and a scalar has none; reshape it to (1,)")
    if axis.size == 1:
        return Pending("all_gather", axis, lambda: x)
    agree("all_gather", x, axis)
    with named_failure("all_gather", axis):
        sent = c10d.all_gather_into_tensor(as_carried(x), axis.size, axis.group)
    shape, dtype = (axis.size * x.shape[0], *x.shape[1:]), x.dtype
    return Pending("all_gather", axis, lambda: from_carried(c10d.wait_tensor(sent), dtype).view(shape))


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Start to sum and scatter: result on rank r = sum over ranks q of x_q[r * s : (r + 1) * s].

    Args:
        x: (size * s, ...), a dtype with addition, the same shape on all ranks; it must not change until the wait.
        axis: the ranks to sum over.

    Returns: a Pending of (s, ...).
    Raises: ValueError if size does not divide dim 0.
    Cost: sends and receives (size - 1) / size * x bytes a rank. gloo's own would send twice that, so on the CPU it is an
        all-to-all and a local sum.

    >>> start_reduce_scatter(torch.arange(3), Axis("data", 0, 0, 1, None)).wait()
    tensor([0, 1, 2])
    """
    if x.ndim == 0 or x.shape[0] % axis.size:
        raise ValueError(f"reduce_scatter: {axis.size} ranks cannot share dim 0 of {tuple(x.shape)} evenly")
    if axis.size == 1:
        return Pending("reduce_scatter", axis, lambda: x)
    agree("reduce_scatter", x, axis)
    if x.is_cuda:
        with named_failure("reduce_scatter", axis):
            sent = c10d.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group)
        return Pending("reduce_scatter", axis, lambda: c10d.wait_tensor(sent))
    return scatter_combined("reduce_scatter", x, axis, sum_by_rank)


def start_psum(x: Tensor, axis: Axis) -> Pending:
    """Start to sum: result = sum over ranks r of x_r, the same bits on all ranks.

    Args:
        x: any shape, a dtype with addition, the same shape on all ranks; it must not change until the wait.
        axis: the ranks to sum over.

    Returns: a Pending of x's shape.
    Cost: sends and receives 2 (size - 1) / size * x bytes a rank. On the CPU, over more than two ranks, it is a reduce_scatter
        and an all_gather, the second started by the wait.

    >>> start_psum(torch.arange(3), Axis("data", 0, 0, 1, None)).wait()
    tensor([0, 1, 2])
    """
    if axis.size == 1:
        return Pending("psum", axis, lambda: x)
    agree("psum", x, axis)
    if one_call(x, axis):
        return start_all_reduce("psum", x, axis, "sum")
    return all_combined("psum", x, axis, sum_by_rank)


def start_psum_(x: Tensor, axis: Axis) -> Pending:
    """`start_psum` of what is not needed any more: where it can, it sums in x's own memory.

    >>> start_psum_(torch.arange(3), Axis("data", 0, 0, 1, None)).wait()
    tensor([0, 1, 2])
    """
    if axis.size == 1 or not (one_call(x, axis) and x.is_contiguous()):
        return start_psum(x, axis)
    agree("psum", x, axis)
    with named_failure("psum", axis):
        sent = c10d.all_reduce_(x, "sum", axis.group)
    return Pending("psum", axis, lambda: c10d.wait_tensor(sent))


def one_call(x: Tensor, axis: Axis) -> bool:
    """Whether a backend's own sum is the same on all ranks, in the order of the ranks: of two numbers there is one sum."""
    return x.is_cuda or (axis.size == 2 and x.dtype in CARRIED)


def start_pmax(x: Tensor, axis: Axis) -> Pending:
    """Start to take the largest: result = max over ranks r of x_r, elementwise; a NaN on any rank gives NaN (on GPUs, NCCL's max).

    Args, Returns, Cost: as `start_psum`; x real.

    >>> start_pmax(torch.arange(3), Axis("data", 0, 0, 1, None)).wait()
    tensor([0, 1, 2])
    """
    if axis.size == 1:
        return Pending("pmax", axis, lambda: x)
    agree("pmax", x, axis)
    return start_all_reduce("pmax", x, axis, "max") if x.is_cuda else all_combined("pmax", x, axis, lambda parts: parts.amax(0))


def start_all_to_all(x: Tensor, axis: Axis) -> Pending:
    """Start to exchange: result[q] on rank r = x_q[r], for q < size.

    Args:
        x: (size, ...), any dtype, the same shape on all ranks; it must not change until the wait.
        axis: the ranks to exchange with.

    Returns: a Pending of x's shape.
    Cost: sends and receives (size - 1) / size * x bytes a rank.

    >>> start_all_to_all(torch.arange(1), Axis("data", 0, 0, 1, None)).wait()
    tensor([0])
    """
    if axis.size == 1:
        return Pending("all_to_all", axis, lambda: x)
    agree("all_to_all", x, axis)
    counts, shape = [x.numel() // axis.size] * axis.size, x.shape
    pending = start_exchange("all_to_all", x.reshape(-1), axis, counts, counts)
    return Pending("all_to_all", axis, lambda: pending.wait().view(shape))


def start_exchange(operation: str, x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Pending:
    """Start to send send[q] elements of flat x to each rank q, in order, and to receive receive[q] from it."""
    carried = as_carried(x)
    width, dtype = x.element_size() // carried.element_size(), x.dtype  # what is pending must not hold x
    with named_failure(operation, axis):
        sent = c10d.all_to_all_single(carried, [n * width for n in receive], [n * width for n in send], axis.group)
    return Pending(operation, axis, lambda: from_carried(c10d.wait_tensor(sent), dtype))


def start_all_reduce(operation: str, x: Tensor, axis: Axis, reduce_op: str) -> Pending:
    with named_failure(operation, axis):
        sent = c10d.all_reduce(x.contiguous(), reduce_op, axis.group)
    return Pending(operation, axis, lambda: c10d.wait_tensor(sent))


def scatter_combined(operation: str, x: Tensor, axis: Axis, combine: Callable[[Tensor], Tensor]) -> Pending:
    """Rank r's share, dim 0 cut evenly, of what `combine` makes of all ranks' x: an exchange of shares, combined here."""
    counts = [x.numel() // axis.size] * axis.size
    pending = start_exchange(operation, x.reshape(-1), axis, counts, counts)
    shape = (axis.size, x.shape[0] // axis.size, *x.shape[1:])
    return Pending(operation, axis, lambda: combine(pending.wait().view(shape)))


def all_combined(operation: str, x: Tensor, axis: Axis, combine: Callable[[Tensor], Tensor]) -> Pending:
    """What `combine` makes of all ranks' x: each rank combines its share, and the shares are gathered."""
    shape, count = x.shape, x.numel()
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -count % axis.size))
    padded, pending = flat.numel() > count, scatter_combined(operation, flat, axis, combine)

    def finish() -> Tensor:
        gathered = start_all_gather(pending.wait(), axis).wait()
        return (gathered[:count].clone() if padded else gathered).view(shape)  # dual numbers want storage of that size

    return Pending(operation, axis, finish)


def sum_by_rank(parts: Tensor) -> Tensor:
    """(size, ...) -> (...): the sum in the order of the ranks, accumulated in at least float32, rounded once."""
    narrow = parts.dtype.is_floating_point and parts.element_size() < 4
    total, *rest = parts.to(torch.float32) if narrow else parts
    for part in rest:
        total = total + part
    return total.to(parts.dtype)


def as_carried(x: Tensor) -> Tensor:
    """The elements of x, flat and contiguous, in a dtype that the backends carry."""
    flat = x.reshape(-1).contiguous()
    return flat if x.dtype in CARRIED else flat.view(torch.uint8)


def from_carried(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)
