"""Messages between two ranks of an axis: trees of tensors, whatever their form, each by a name that both ends know."""
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis
from .pytree import tree_flatten, tree_unflatten
from .wire import as_carried, from_carried, named_failure

Sent = list[tuple[Any, Tensor]]         # a send under way, and what must not change until it is done


class Mailbox:
    """Sends trees to, and receives them from, the ranks of an axis.

    A message is 8 bytes, its form where that is not the form of the last one over the same link, and the leaves. Sends do not
    wait; `close` waits for them all.

    Args:
        axis: the ranks; their group must carry CPU tensors.

    Raises:
        CollectiveError: a peer died or came too late.
    """

    def __init__(self, axis: Axis):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        self.axis, self.group = axis, None if axis.group is None else resolve(axis.group)
        self.told: dict[tuple[int, int], bytes] = {}
        self.heard: dict[tuple[int, int], tuple[Any, list]] = {}

    def send(self, tree: Any, to: int, tag: int, link: int = 0) -> Sent:
        """Start to send a tree; forms are remembered for each (rank, link)."""
        leaves, spec = tree_flatten(tree)
        form = pickle.dumps((spec, [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else Plain(x) for x in leaves]))
        known = self.told.get((to, link)) == form
        self.told[to, link] = form
        head = [torch.tensor(0 if known else len(form))]
        parts = head if known else [*head, torch.frombuffer(bytearray(form), dtype=torch.uint8)]
        parts += [as_carried(x.detach()) for x in leaves if isinstance(x, Tensor) and x.numel()]
        with named_failure("send", self.axis):
            return [(dist.isend(x, group=self.group, group_dst=to, tag=tag), x) for x in parts]

    def receive(self, source: int, tag: int, link: int = 0) -> Any:
        """Wait for a tree."""
        length = int(self.get(torch.zeros((), dtype=torch.int64), source, tag))
        if length:
            form = self.get(torch.empty(length, dtype=torch.uint8), source, tag)
            self.heard[source, link] = pickle.loads(form.numpy().tobytes())
        spec, kinds = self.heard[source, link]
        return tree_unflatten(spec, [k.value if isinstance(k, Plain) else self.tensor(k[0], k[1], source, tag) for k in kinds])

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        if x.numel():
            carried = as_carried(x)
            x = from_carried(self.get(carried, source, tag), dtype).view(shape)
        return x

    def get(self, x: Tensor, source: int, tag: int) -> Tensor:
        with named_failure("receive", self.axis):
            got: Any = dist.irecv(x, group=self.group, group_src=source, tag=tag)
            got.wait()
        return x

    def finish(self, sent: Sent) -> None:
        """Wait for sends."""
        with named_failure("send", self.axis):
            for work, _ in sent:
                work.wait()


class Plain:
    """A leaf that is no tensor: it is part of a message's form."""

    def __init__(self, value: Any):
        self.value = value


def send_all(messages: Sequence[tuple[int, Any]], axis: Axis) -> None:
    """Send trees, each to a rank of an axis, and wait until all have them."""
    box = Mailbox(axis)
    for sent in [box.send(tree, to, tag=0) for to, tree in messages]:
        box.finish(sent)


def receive(axis: Axis, source: int) -> Any:
    """What `send_all` sends from a rank of an axis to this one."""
    return Mailbox(axis).receive(source, tag=0)
