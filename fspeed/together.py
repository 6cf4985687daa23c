"""Things that all ranks do, or do not, together: what one raises, all raise, so that none is left waiting."""
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """This process's number in the run; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes the run has; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def together(fn: Callable[[], T]) -> T:
    """fn() on every rank; if it raises on any, all raise the error of the first that did.

    Cost: one all-gather of a small object.

    >>> together(lambda: 1)
    1
    """
    error = result = None
    try:
        result = fn()
    except Exception as e:
        error = e
    for at, other in enumerate(errors_of_all(error)):
        if other is not None:
            other.add_note(f"(on rank {at})")
            raise other if error is None or at != rank() else error
    return cast(T, result)


def errors_of_all(error: Exception | None) -> list[Exception | None]:
    """The error of every rank, by rank; one whose class is not Python's own travels as a RuntimeError."""
    errors: list[Exception | None] = [error] * world_size()
    if world_size() > 1:
        own = error is None or type(error).__module__ == "builtins"
        dist.all_gather_object(errors, error if own else RuntimeError(f"{type(error).__name__}: {error}"))
    return errors


def on_rank_0(fn: Callable[[], T]) -> T:
    """What fn() returns, or raises, on rank 0, on every rank.

    Cost: an all-gather and a broadcast of small objects.

    >>> on_rank_0(lambda: 1)
    1
    """
    box = [together(fn if rank() == 0 else lambda: None)]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    return cast(T, box[0])
