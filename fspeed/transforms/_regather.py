"""Weights that are freed between a layer's forward and its backward, and made again by the layer's views."""
import torch
from torch import Tensor

from fspeed.grad import in_backward, in_torch_func, in_trace
from fspeed.graph.regather import marked
from fspeed.opened import Opening
from fspeed.shard.pytree import tree_leaves, tree_map


class Regathered:
    """The weights of the use of a layer that was last, in forward or, made again, in backward: of one use at a time.

    So the layer whose backward follows its forward at once, the last one, finds its weights still there.
    """

    def __init__(self):
        self.drop()

    def drop(self, grads=()):
        self.use, self.leaves = None, ()

    def hold(self, use, leaves):
        self.use, self.leaves = use, [x.detach() for x in leaves]

    def around(self, opening, at):
        """The layer; what autograd saves of its weights is a note of where they lie, not the weights."""
        if not isinstance(opening, Opening):
            return opening          # a shard of a shard: the innermost frees what all views made

        def run(stored, *args, **kwargs):
            if not torch.is_grad_enabled() or in_torch_func() or in_backward():
                return opening(stored, *args, **kwargs)     # nothing is kept, or it is used at once
            self.drop()
            usable = opening.view(stored)
            if in_trace():
                return opening.fn(marked(usable), *args, **kwargs)
            use = Use(self, opening, stored, usable)
            with torch.autograd.graph.saved_tensors_hooks(use.pack, use.unpack):
                return opening.fn(usable, *args, **kwargs)

        return run


class Use:
    """One use of a layer: which storages its views made, and how to make them again."""

    def __init__(self, slot: Regathered, opening, stored, usable):
        self.slot, self.view = slot, opening.view
        self.stored = tree_map(torch.Tensor.detach, stored)
        kept = {storage(x) for x in tree_leaves(stored)}
        leaves = tree_leaves(usable)
        slot.hold(self, leaves)
        self.index = {storage(x): i for i, x in reversed(list(enumerate(leaves))) if x.numel() and storage(x) not in kept}
        node = next((x.grad_fn for x in leaves if x.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(slot.drop)        # its gradients are all there: the layer's backward is over

    def pack(self, x: Tensor):
        at = self.index.get(storage(x)) if x.layout == torch.strided and x.numel() else None
        return x if at is None else (at, x.dtype, x.is_conj(), x.is_neg(), x.shape, x.stride(), x.storage_offset())

    def unpack(self, saved):
        if isinstance(saved, Tensor):
            return saved
        at, dtype, conj, neg, *where = saved
        if self.slot.use is not self:
            self.slot.drop()
            with torch.no_grad():
                self.slot.hold(self, tree_leaves(self.view(self.stored)))
        base = self.slot.leaves[at].untyped_storage()
        shape, stride, offset = where
        x = torch.empty(0, dtype=dtype, device=base.device).set_(base, offset, shape, stride)
        x = x.conj() if conj else x
        return torch._neg_view(x) if neg else x


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
