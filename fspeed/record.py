"""What a checkpoint says of a tree beside its numbers, as JSON: structure, dtypes, shapes, placements and the layouts of shards."""
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from fspeed.shard.mesh import Axis
from fspeed.shard.piece import Flat, Frozen, Piece, Tied
from fspeed.shard.pytree import NAMESPACE, tree_unflatten
from fspeed.tree import Groups, abstract

Record = dict[str, Any]
PLAIN = (bool, int, float, str)         # leaves beside tensors


def record(node: Any) -> Record:
    """What is static of a tree: of each leaf the dtype and shape, of each node the type, the keys and where its values lie.

    Args:
        node: any pytree. What a node of the user's own class holds beside its children is not recorded.

    Returns:
        Plain JSON, equal for two trees that the same values fit.

    >>> record({"w": torch.zeros(2, 3)})
    {'is': 'dict', 'children': [['w', {'is': 'float32', 'shape': [2, 3]}]]}
    """
    if isinstance(node, Tensor):
        return {"is": dtype_name(node.dtype), "shape": list(node.shape)}
    if optree.tree_is_leaf(node, namespace=NAMESPACE):
        return {"is": type(node).__name__}
    children = [[str(key), record(child)] for key, child in entries(node)]
    return {"is": type(node).__qualname__, **placement(node), "children": children}


def entries(node: Any) -> Iterable[tuple[Any, Any]]:
    """The children of a node with their keys, in the order of its leaves."""
    if isinstance(node, Groups):
        return node.items()
    children, _, keys, _ = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
    return zip(type(node)._fields if optree.is_namedtuple(node) else keys, children, strict=True)


def placement(node: Any) -> Record:
    """Where the values of a node lie: what rebuilds whole leaves from what its ranks keep."""
    if isinstance(node, Groups):
        return {"transforms": list(node.placed), "axes": [axis(a) for a in node.axes]}
    if isinstance(node, Piece):
        layout = flat(node.layout) if isinstance(node.layout, Flat) else node.layout
        return {"axis": axis(node.axis), "holders": node.holders, "layout": layout}
    return {"at": node.at} if isinstance(node, Tied) else {}


def axis(a: Axis) -> Record:
    return {"name": a.name, "size": a.size, "rank": a.rank, "splits_batch": a.splits_batch}


def flat(layout: Flat) -> Record:
    """How a group lies in flat buffers: the group with its leaves' shapes, the buffer of each leaf, and the buffers."""
    rows = [(layout.buckets[at], shape) for at, shape in zip(layout.place, layout.shapes, strict=True)]
    metas = [(b.frozen, torch.empty(shape, dtype=b.dtype, device="meta")) for b, shape in rows]
    group = tree_unflatten(layout.spec, [Frozen(x) if frozen else x for frozen, x in metas])
    buckets = [[dtype_name(b.dtype), b.frozen, b.numel] for b in layout.buckets]
    cuts = {} if layout.cuts is None else {"cuts": layout.cuts}
    return {"group": record(group), "buffer": list(layout.place), "buffers": buckets, **cuts}


def parameters(params: Groups) -> Record:
    """The whole parameters, however they are placed: each leaf by its path, with its group, and the tree that they form."""
    say = lambda name, x: f"{dtype_name(x.dtype)} {list(x.shape)}{' frozen' * x.frozen} in {name}"
    leaves = {leaf.path: say(name, leaf) for name in params.names for leaf in params.leaves(name)}
    return {"leaves": leaves, "tree": record(abstract(params))}


def paths(rec: Record, prefix: str = "") -> Iterator[str]:
    """The path of each leaf of the recorded tree, in the order of its leaves."""
    if "children" not in rec:
        yield prefix
    for key, child in rec.get("children", ()):
        yield from paths(child, f"{prefix}/{key}" if prefix else key)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(x: Tensor) -> str:
    """The SHA-256 of a tensor's dtype, shape and elements: 64 hex digits.

    Cost: a read of the tensor, and a copy on the CPU if it lies elsewhere or is not contiguous.

    >>> digest(torch.ones(2)) == digest(torch.ones(4)[::2]), digest(torch.ones(2)) == digest(torch.ones(2, 1))
    (True, False)
    """
    plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))         # a dim of size 1 has any stride
    found = hashlib.sha256(f"{dtype_name(x.dtype)} {list(x.shape)} ".encode())
    found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def difference(saved: Record, here: Record, path: str) -> tuple[str, str, Any, Any] | None:
    """Where two records first differ: the path, what differs there, and both values; None if they are equal.

    >>> difference(record({"w": torch.zeros(2)}), record({"w": torch.zeros(3)}), "params")
    ('params/w', 'shape', [2], [3])
    """
    for what in dict.fromkeys([*saved, *here]):
        a, b = saved.get(what), here.get(what)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            return difference(a, b, f"{path} {what}")
        if what != "children" or a is None or b is None:
            return path, what, a, b
        keys, others = [key for key, _ in a], [key for key, _ in b]
        if keys != others:
            return path, "keys", keys, others
        return next(d for key, x, y in zip(keys, a, b, strict=True) if (d := difference(x[1], y[1], f"{path}/{key}")))
    return None
