"""Counting what a step sends and holds, exactly: collectives by their calls, memory by the allocator's own events."""
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fspeed.shard.pytree import tree_leaves

os.environ.setdefault("KINETO_LOG_LEVEL", "99")      # the profiler tells every start and stop on the terminal otherwise

# seconds in which gloo's threads let go of their last buffers: they tell the profiler, which must still be there
SETTLE = 0.05

# elements sent by one rank of N, for n elements in: (operation, N) -> factor of n
SENT = {
    "all_reduce": lambda n, size: 2 * n * (size - 1) / size,
    "all_gather_into_tensor": lambda n, size: n * (size - 1),
    "reduce_scatter_tensor": lambda n, size: n * (size - 1) / size,
    "all_to_all_single": lambda n, size: n * (size - 1) / size,
    "send": lambda n, size: n,
}


class Counted(TorchDispatchMode):
    """While it is entered, what this rank sends: `sent[operation]` elements, `bytes[operation]`, `calls[operation]`.

    Args:
        size: how many ranks the axis has.
        least: calls of fewer elements are not counted: losses, row numbers and flags.

    `gathered` is the most bytes of gathered buffers alive at once.

    >>> with Counted(1) as counted:
    ...     _ = torch.ones(3) + 1
    >>> dict(counted.sent)
    {}
    """

    def __init__(self, size: int, least: int = 32):
        super().__init__()
        self.size, self.least = size, least
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._opname.removesuffix("_")          # in place it sends the same
        if func.namespace not in ("_c10d_functional", "c10d") or name not in SENT:
            return out
        x = args[0][0] if name == "send" else args[0]
        if x.numel() < self.least:
            return out
        sent = int(SENT[name](x.numel(), self.size))
        self.sent[name] += sent
        self.bytes[name] += sent * x.element_size()
        self.calls[name] += 1
        if name == "all_gather_into_tensor":
            self.alive.append((StorageWeakRef(out.untyped_storage()), out.numel() * out.element_size()))
            self.gathered = max(self.gathered, self.least_alive())
        return out

    def least_alive(self) -> int:
        """Gathered bytes that are alive; a few looks where they are the most so far, as gloo lets go a moment after its wait."""
        for _ in range(10):
            self.alive = [(ref, n) for ref, n in self.alive if not ref.expired()]
            if (found := sum(n for _, n in self.alive)) <= self.gathered:
                break
            time.sleep(0.001)
        return found

    @property
    def total(self) -> int:
        """All elements sent."""
        return sum(self.sent.values())


def allocated_peak(fn: Callable[[], Any]) -> int:
    """The most tensor bytes alive at once while fn runs, beyond those alive before, by the CPU allocator's events.

    >>> allocated_peak(lambda: torch.zeros(1000).clone())
    8000
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = fn()
        time.sleep(SETTLE)
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        alive += e.nbytes()
        peak = max(peak, alive)
    del kept
    return peak


def stored_bytes(tree: Any) -> int:
    """The bytes of a tree's tensors, each storage once."""
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor))}
    return sum(storages.values())
