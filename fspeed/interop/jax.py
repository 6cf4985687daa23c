"""Trees between torch and JAX by DLPack, and optax's optimizers under a step; needs JAX.

Importing this module makes `State`, and every other node of fspeed's, a JAX pytree too. A tree keeps its structure and its names
both ways; JAX sorts the keys of a dict, so pair leaves by name, never by position.

>>> from fspeed import optim
>>> from fspeed.loss import mean
>>> from fspeed.step import step
>>> s = step(lambda p, batch, key: mean((p["w"] - batch) ** 2), optim.sgd(0.25))
>>> params = {"w": jax.numpy.zeros(())}
>>> state, _ = s(s.init(to_torch(params)), torch.tensor([1., 3.]))
>>> to_jax(s.params(state))
{'w': Array(1., dtype=float32)}
"""
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
import optree
import torch
from jax import tree_util
from torch import Tensor

from fspeed.optim.base import GradientTransformation
from fspeed.optim.wholes import placed_like
from fspeed.record import dtype_name
from fspeed.shard.piece import Absent, Piece
from fspeed.shard.pytree import NAMESPACE, VIEWS, register_with_jax, tree_leaves
from fspeed.tree import Groups, gathered

register_with_jax()

SCALARS = (bool, int, float, complex, str)
THREEFRY = "threefry2x32"


def to_torch(tree: Any, *, copy: bool = True) -> Any:
    """A tree of torch tensors from one of JAX arrays: the same structure, dtypes, shapes and bits.

    A step takes it as it is: flax's `FrozenDict`, equinox's modules and whatever else JAX knows become nodes of fspeed's too.

    Args:
        tree: any JAX pytree: arrays of JAX or NumPy; tensors, numbers and strings stay. Typed keys become raw keys of
            `fspeed.random`, int32 (..., 2): they draw the same bits.
        copy: False to share memory with JAX, which takes its arrays for immutable: only read what comes out.

    Returns:
        The same tree of tensors, on the devices where the arrays are.

    Raises:
        TypeError, ValueError: with the path of a leaf that torch cannot have: a function (of an equinox module, say: partition it
            first), a traced array, one on several devices, a dtype that torch lacks, a key of another kind than threefry.

    Cost: waits for the arrays; 5 us a leaf, and a copy.

    >>> to_torch({"w": jax.numpy.ones(2), "key": jax.random.key(3)})
    {'key': tensor([0, 3], dtype=torch.int32), 'w': tensor([1., 1.])}
    """
    return converted("to_torch", tree, lambda x: torch_leaf(x, copy), is_leaf=adopted)


def to_jax(tree: Any, *, copy: bool = True) -> Any:
    """A tree of JAX arrays from one of torch tensors: the same structure, dtypes, shapes and bits.

    Args:
        tree: any pytree that JAX knows, a `State` too: tensors, NumPy arrays; JAX arrays, numbers and strings stay. A raw key is
            integers like any other; `key_to_jax` makes a key of it.
        copy: False to share memory where that is possible. JAX computes later than it returns: write to a shared tensor only
            when everything that was computed from it is there (`jax.block_until_ready`).

    Returns:
        The same tree of JAX arrays, on the devices where the tensors are.

    Raises:
        TypeError, ValueError: with the path of a leaf that JAX would change or cannot have: 64-bit numbers while JAX has them
            off, a tensor that is being differentiated, a traced or sparse one.

    Cost: 30 us a leaf, and a copy.

    >>> to_jax({"w": torch.ones(2, dtype=torch.bfloat16), "n": 3})
    {'n': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    return converted("to_jax", tree, lambda x: jax_leaf(x, copy))


def key_to_jax(key: Tensor) -> jax.Array:
    """JAX's typed key of a raw key of `fspeed.random`: it draws the same bits. `to_torch` is the way back.

    Args:
        key: int32 (..., 2).

    Raises:
        ValueError: it is no raw key.

    >>> from fspeed import random
    >>> jax.random.bits(key_to_jax(random.key(3)), (2,)).view("int32") == to_jax(random.bits(random.key(3), (2,)))
    Array([ True,  True], dtype=bool)
    """
    if key.dtype != torch.int32 or key.shape[-1:] != (2,):
        raise ValueError(f"key_to_jax: a raw key is int32 (..., 2), as fs.random.key makes it; got {key.dtype} {tuple(key.shape)}")
    return jax.random.wrap_key_data(to_jax(key.view(torch.uint32)), impl=THREEFRY)


def from_optax(tx: Any, *, elementwise: bool = False) -> GradientTransformation:
    """An optimizer of optax's as one of fspeed's, on trees of tensors.

    It is right under every placement: what is sharded is gathered for it, and each rank keeps its part of the updates and the
    whole optimizer state. With `elementwise` nothing is gathered, and the state is sharded like the parameters.

    Args:
        tx: an optax `GradientTransformation`. Masks and labels are best given as functions; they see the parameters by groups.
        elementwise: promises that an element's update depends on nothing but that element's gradient, parameter and state, as in
            sgd, adam and lion; not so with global or per-tensor norms, factored moments, or masks by shape or name.

    Returns:
        A `GradientTransformation` whose state is optax's, of tensors: it is saved and restored like any other.

    Raises:
        ValueError: when called: some of a sharded tree is not here to be gathered (a pipeline's stages).

    Cost: a jitted call; copies of the updates and the new state. Sharded and not elementwise: two all-gathers of the
        parameters' size a step, and 1/1 of the optimizer state on each rank in place of 1/N.

    >>> import optax
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = step(lambda p, batch, key: mean((p["w"] - batch) ** 2), from_optax(optax.sgd(0.25)))
    >>> s.params(s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))[0])
    {'w': tensor(1.)}
    """
    seen = (lambda tree: tree) if elementwise else in_whole
    update_jitted = jax.jit(tx.update)

    def init(params: Any) -> Any:
        return to_torch(tx.init(to_jax(seen(params))))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        args = to_jax((seen(grads), state, seen(params)), copy=False)
        updates, state = to_torch(update_jitted(*args))     # waits: then nobody reads what is shared any more
        return updates if elementwise else placed(grads, updates), state

    return GradientTransformation(init, update)


# ---------------------------------------------------------------- trees
def converted(who: str, tree: Any, leaf: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A JAX pytree with each leaf converted; errors name the leaf."""
    rows, spec = tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    out = []
    for path, x in rows:
        try:
            out.append(leaf(x))
        except Exception as error:
            at = tree_util.keystr(path, simple=True, separator="/")
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{who}: {f'leaf {at!r}' if at else 'the value'} {error}") from error
    return tree_util.tree_unflatten(spec, out)


def adopted(node: Any) -> bool:
    """Never a leaf; but a node that JAX knows and fspeed does not is known to fspeed from now on."""
    if optree.tree_is_leaf(node, namespace=NAMESPACE) and not tree_util.all_leaves([node]):
        adopt(node)
    return False


def adopt(example: Any) -> None:
    """Register the class of a node with optree as it is registered with JAX, under the same names."""
    def flatten(node: Any) -> tuple:
        rows, spec = tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        return [x for _, x in rows], spec, tuple(entry(path[0]) for path, _ in rows)

    def unflatten(spec: Any, children: Any) -> Any:
        return tree_util.tree_unflatten(spec, children)

    rows, _ = tree_util.tree_flatten_with_path(example, is_leaf=lambda x: x is not example)
    access = ACCESS.get(type(rows[0][0][0]), optree.AutoEntry) if rows else optree.AutoEntry
    for space in (NAMESPACE, *VIEWS):
        optree.register_pytree_node(type(example), flatten, unflatten, namespace=space, path_entry_type=access)


ACCESS: dict[Any, Any] = {
    tree_util.GetAttrKey: optree.GetAttrEntry, tree_util.DictKey: optree.GetItemEntry, tree_util.SequenceKey: optree.GetItemEntry,
}


def entry(key: Any) -> Any:
    """What a key of JAX's path is in itself: a name, a dict's key or a number."""
    return next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), str(key))


# ---------------------------------------------------------------- leaves
def torch_leaf(x: Any, copy: bool) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return from_numpy(x)
    if not isinstance(x, jax.Array):
        return kept(x, Tensor)
    if isinstance(x, jax.core.Tracer):
        raise TypeError("is traced: call to_torch outside jax.jit, jax.grad and the like")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        if str(jax.random.key_impl(x)) != THREEFRY:
            raise ValueError(f"is a key of {jax.random.key_impl(x)}; fspeed's keys are those of {THREEFRY}")
        return torch_leaf(jax.random.key_data(x), copy).view(torch.int32)
    if len(x.devices()) > 1:
        raise ValueError(f"lies on {len(x.devices())} devices; bring it to one: jax.device_put(x, jax.devices()[0])")
    out = torch.from_dlpack(x)
    return same(out.clone() if copy else out, str(x.dtype), dtype_name(out.dtype))


def jax_leaf(x: Any, copy: bool) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        x = from_numpy(x)
    if not isinstance(x, Tensor):
        return kept(x, jax.Array)
    if x.grad_fn is not None:
        raise ValueError("is being differentiated, which would end here: detach it")
    name = dtype_name(x.dtype)
    if x.dtype.itemsize > 4 and str(jax.dtypes.canonicalize_dtype(name)) != name:
        raise ValueError(
            f"is {name}, which JAX would make {jax.dtypes.canonicalize_dtype(name)}: allow it by "
            "jax.config.update('jax_enable_x64', True), or cast the leaf first"
        )
    plain = x.detach().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format) if copy else plain.contiguous()
    out = jax.dlpack.from_dlpack(plain)         # its own copy=True does not copy
    return same(out, name, str(out.dtype))


def from_numpy(x: Any) -> Tensor:
    """A copy; NumPy itself has no bfloat16 and its like, but JAX's arrays become NumPy's of them."""
    own = np.array(x)
    if own.dtype.kind != "V":
        return torch.from_numpy(own)
    return torch.from_numpy(own.view(f"u{own.itemsize}")).view(getattr(torch, own.dtype.name))


def same(out: Any, dtype: str, got: str) -> Any:
    if got != dtype:
        raise ValueError(f"is {dtype} and would become {got}: cast it first")
    return out


def kept(x: Any, cls: type) -> Any:
    if isinstance(x, (cls, *SCALARS)):
        return x
    raise TypeError(
        f"is a {type(x).__name__}; leaves are arrays, numbers and strings: keep others out of the tree "
        "(of an equinox module by equinox.partition(module, equinox.is_array))"
    )


# ---------------------------------------------------------------- placements
def in_whole(tree: Any) -> Any:
    """A tree of stored groups with every leaf whole."""
    if not isinstance(tree, Groups):
        return tree
    whole = tree.map(lambda name, group: gathered(group))
    missing = lambda x: isinstance(x, (Piece, Absent))
    if any(map(missing, tree_leaves(cast(Any, whole), is_leaf=missing))):
        raise ValueError(
            "from_optax: some parameters are on other ranks and cannot be gathered here; with an optimizer that looks at "
            "single elements only, pass elementwise=True, else use fspeed.optim's"
        )
    return whole


def placed(stored: Any, whole: Any) -> Any:
    """Each rank's part of whole leaves, as another tree is stored."""
    if not isinstance(stored, Groups):
        return whole
    return stored.map(lambda name, group, all: placed_like(group, iter(tree_leaves(all))), whole)
