"""Work that is started before it is asked for, in the order in which it was asked for the last time."""
from collections.abc import Callable
from typing import Any

import torch

from fspeed.grad import in_replay, in_torch_func
from fspeed.shard.pytree import tree_leaves
from fspeed.tree import ROOT

Begin = Callable[[str, Any], Callable[[], Any]]     # starts what is to be made of a stored group, and gives what waits for it


class Ahead:
    """What one run makes of stored groups, one layer being under way while the layer before it is used.

    Args:
        begin: starts the work on a group.
        params: the stored groups.
        order: the layers that the last run asked for. It is a hint: what was started for nothing is waited for and dropped.
    """

    def __init__(self, begin: Begin, params: Any, order: list[str]):
        self.begin, self.stored, self.order, self.at = begin, dict(params.here()), order, 0
        self.asked: list[str] = []
        self.started: tuple[str, Callable[[], Any]] | None = None

    def __call__(self, name: str, stored: Any) -> Any:
        if in_torch_func() or in_replay():      # somebody differentiates, or wants the same operations at each replay
            return self.begin(name, stored)()
        if name == ROOT:                        # it is asked for first, so it is never started ahead, and the first layer behind it
            made = self.begin(name, stored)
            self.start()
            return made()
        made = self.take(name, stored)
        self.seen(name)
        self.start()
        return made

    def take(self, name: str, stored: Any) -> Any:
        """What was started for a layer; if that was of another layer or other values, it is dropped, and this one begins now."""
        if self.started is not None and self.started[0] == name and same(stored, self.stored[name]):
            (_, finish), self.started = self.started, None
            return finish()
        self.drop()
        return self.begin(name, stored)()

    def seen(self, name: str) -> None:
        """Note what was asked for, and go on behind it in the last run's order."""
        self.asked.append(name)
        if name in self.order[self.at:]:
            self.at = self.order.index(name, self.at) + 1

    def start(self) -> None:
        """Start what was asked for next in the last run."""
        name = self.order[self.at] if self.at < len(self.order) else ROOT
        if self.started is None and name != ROOT and name in self.stored:
            with torch.no_grad():
                self.started = name, self.begin(name, self.stored[name])

    def drop(self) -> None:
        """Wait for what was started for nothing."""
        if self.started is not None:
            (_, finish), self.started = self.started, None
            finish()

    def close(self) -> list[str]:
        """At the end of a run: what was asked for, in order."""
        self.drop()
        return self.asked


def same(a: Any, b: Any) -> bool:
    """Whether two trees of as many tensors lie in the same memory."""
    return [x.data_ptr() for x in tree_leaves(a)] == [x.data_ptr() for x in tree_leaves(b)]
