"""What the stages of a pipeline hand to each other, by message or, on one rank, by hand."""
from collections import defaultdict
from typing import Any

import torch

from fspeed.shard.mesh import Axis
from fspeed.shard.messages import Mailbox, Sent
from fspeed.shard.pytree import tree_map
from fspeed.shard.schedules import Action, Proof, as_needed, needs


class Post:
    """Takes what one action of a schedule makes to the action of another stage that needs it.

    What was sent is let go of once a message shows that it has come: one from the action that used it, or a later one.
    """

    def __init__(self, proof: Proof, ax: Axis):
        self.proof, self.ax, self.box = proof, ax, Mailbox(ax)
        self.local: dict[Action, Any] = {}
        self.sent: dict[int, list[tuple[int, Sent]]] = defaultdict(list)
        self.made: dict[Any, int] = {}      # of what an action hands on: when it is made, and used, by its rank
        self.used: dict[Any, int] = {}
        for actions in proof.schedule.ranks:
            for at, a in enumerate(actions):
                self.made[as_needed(a)] = at
                self.used.update((n, at) for n in needs(a, proof.stages) if n.stage != a.stage)

    def give(self, a: Action, tree: Any) -> None:
        """Hand on what F or I has made."""
        to = self.proof.owner[a.stage + (1 if a.kind == "F" else -1)]
        if to == self.ax.rank:
            self.local[a] = tree
        else:
            self.sent[to].append((self.used[a], self.box.send(tree, to, self.tag(a))))

    def take(self, a: Action) -> Any:
        """Wait for what F or I of another stage has made."""
        source = self.proof.owner[a.stage]
        if source == self.ax.rank:
            return self.local.pop(a)
        tree = self.box.receive(source, self.tag(a))
        for at, sent in self.sent[source]:
            if at <= self.made[a]:
                self.box.finish(sent)
        self.sent[source] = [(at, sent) for at, sent in self.sent[source] if at > self.made[a]]
        return tree

    def tag(self, a: Action) -> int:
        return 2 + 2 * (a.stage * self.proof.microbatches + a.micro) + (a.kind == "I")

    def share(self, metrics: Any = None) -> Any:
        """The last stage's metrics on its rank, and zeros of their form on all others."""
        source = self.proof.owner[-1]
        if self.ax.rank != source:
            return tree_map(torch.zeros_like, self.box.receive(source, tag=1))
        for rank in range(self.ax.size):
            if rank != source:
                self.sent[rank].append((-1, self.box.send(metrics, rank, tag=1)))
        return metrics

    def close(self) -> None:
        """Wait until all that was sent has come."""
        for pending in self.sent.values():
            for _, sent in pending:
                self.box.finish(sent)
