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


FORMS = 1 << 30                         # tags from here on are of forms


class Mailbox:
    """Sends trees to, and receives them from, the ranks of an axis; both ends may do so in different orders.

    A message is 16 bytes, which say its form by number, and the leaves. A form (structure, shapes, dtypes, what is no tensor) is
    sent once to each rank. Sends do not wait.

    Args:
        axis: the ranks; their group must carry CPU tensors.

    Raises:
        CollectiveError: a peer died or came too late.
    """

    def __init__(self, axis: Axis):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        self.axis, self.group = axis, None if axis.group is None else resolve(axis.group)
        self.told: dict[tuple[int, bytes], int] = {}
        self.heard: dict[tuple[int, int], tuple[Any, list]] = {}

    def send(self, tree: Any, to: int, tag: int) -> Sent:
        """Start to send a tree by a tag below 2**30."""
        leaves, spec = tree_flatten(tree)
        form = pickle.dumps((spec, [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else Plain(x) for x in leaves]))
        new = (to, form) not in self.told
        number = self.told.setdefault((to, form), len(self.told))
        sent = [self.put(torch.frombuffer(bytearray(form), dtype=torch.uint8), to, FORMS + number)] if new else []
        tensors = [as_carried(x.detach()) for x in leaves if isinstance(x, Tensor) and x.numel()]
        parts = [torch.tensor([number, len(form)]), *tensors]
        return [*sent, *(self.put(x, to, tag) for x in parts)]

    def receive(self, source: int, tag: int) -> Any:
        """Wait for a tree."""
        number, length = self.get(torch.empty(2, dtype=torch.int64), source, tag).tolist()
        if (source, number) not in self.heard:
            form = self.get(torch.empty(length, dtype=torch.uint8), source, FORMS + number)
            self.heard[source, number] = pickle.loads(form.numpy().tobytes())
        spec, kinds = self.heard[source, number]
        return tree_unflatten(spec, [k.value if isinstance(k, Plain) else self.tensor(k[0], k[1], source, tag) for k in kinds])

    def put(self, x: Tensor, to: int, tag: int) -> tuple[Any, Tensor]:
        with named_failure("send", self.axis):
            return dist.isend(x, group=self.group, group_dst=to, tag=tag), x

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
