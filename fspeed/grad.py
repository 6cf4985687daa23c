"""Pull-backs of functions on trees: by plain autograd where nobody else differentiates, by torch.func where somebody does."""
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fspeed.shard.piece import live, parted, replace_live
from fspeed.shard.pytree import tree_leaves, tree_map


def in_torch_func() -> bool:
    """Whether a transform of torch.func (grad, vjp, jvp, vmap) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_trace() -> bool:
    """Whether the operations that are done now become a graph."""
    return get_proxy_mode() is not None


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_replay() -> bool:
    """Whether operations are recorded to be replayed: those that are done now must be done again, in the same order."""
    return any(getattr(mode, "replays", False) for mode in _get_current_dispatch_mode_stack())


def in_jvp() -> bool:
    """Whether forward-mode derivatives are being taken."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def watched(*trees: Any) -> bool:
    """Whether somebody outside differentiates or batches what is done to the trees."""
    if in_torch_func():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tree_leaves(trees) if isinstance(x, Tensor))


def requires_grad(x: Any) -> bool:
    """Whether x is a tensor, and somebody differentiates with respect to what it comes from."""
    return isinstance(x, Tensor) and (x.requires_grad or torch._C._functorch.is_gradtrackingtensor(x))


def vjp(f: Callable[[Any], tuple[Any, Any]], tree: Any, *closed: Any) -> tuple[Any, Callable[[Any], Any], Any]:
    """A function's value and its pull-back: `out, pull, aux` for `out, aux = f(tree)`.

    Args:
        f: from a tree to a tree of tensors and anything else.
        tree: a pytree of tensors; what is in `Frozen` nodes is not differentiated.
        closed: other tensors that f uses: if any of them is differentiated from outside, that goes on through here.

    Returns:
        `out`; `pull`, to be called once: from cotangents of `out`'s live leaves to those of `tree`'s; and `aux`.

    Cost: what autograd keeps. With nobody watching, tensors are plain ones and nothing is kept for higher orders.

    >>> out, pull, _ = vjp(lambda t: (t["x"] ** 2, None), {"x": torch.tensor(3.)})
    >>> pull(torch.tensor(1.))
    {'x': tensor(6.)}
    """
    parts = parted(tree)
    seen = (tree if parts.others else parts.leaves, closed)
    return (_vjp_watched if watched(seen) else _vjp_plain)(f, parts)


def _vjp_plain(f, tree):
    xs, form = [x.detach().requires_grad_() for x in tree.leaves], tree.form
    with torch.enable_grad():
        out, aux = f(tree.whole(xs))
    outs = live(out)

    def pull(cotangents):
        pairs = [(o, c) for o, c in zip(outs, live(cotangents), strict=True) if o.requires_grad]
        outs.clear()
        if not pairs:
            return form(torch.zeros_like(x) for x in xs)
        return form(torch.autograd.grad([o for o, _ in pairs], xs, [c for _, c in pairs], materialize_grads=True))

    detach = lambda x: x.detach() if isinstance(x, Tensor) else x
    return replace_live(out, map(detach, outs)), pull, tree_map(detach, aux)


def _vjp_watched(f, tree):
    box = {}

    def flat(*xs):
        box["out"], box["aux"] = f(tree.whole(xs))
        return tuple(live(box["out"])), tuple(x for x in tree_leaves(box["aux"]) if isinstance(x, Tensor))

    outs, pull, aux = torch.func.vjp(flat, *tree.leaves, has_aux=True)
    new = iter(aux)
    back = lambda cotangents: tree.form(pull(tuple(live(cotangents))))
    return replace_live(box["out"], outs), back, tree_map(lambda x: next(new) if isinstance(x, Tensor) else x, box["aux"])


def closed_over(fn: Any, depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a function holds by name, other than its arguments: in its closure, its
    globals, its defaults, or bound by partial."""
    if isinstance(fn, functools.partial):
        held = {**{f"argument {i}": a for i, a in enumerate(fn.args)}, **fn.keywords, "func": fn.func}
    elif hasattr(fn, "__code__"):
        held = dict(zip(fn.__code__.co_freevars, map(_content, fn.__closure__ or ()), strict=True))
        held.update({n: fn.__globals__[n] for n in fn.__code__.co_names if isinstance(fn.__globals__.get(n), Tensor)})
        held.update({f"default {i}": d for i, d in enumerate(fn.__defaults__ or ())}, **(fn.__kwdefaults__ or {}))
    else:
        held = {"fn": getattr(fn, "fn", None)}          # an opened layer, for one
    for name, value in held.items():
        if callable(value) and depth:
            yield from closed_over(value, depth - 1)
        elif isinstance(value, (Tensor, dict, list, tuple)):
            yield from ((name, x) for x in tree_leaves(value) if isinstance(x, Tensor))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:      # a variable that is not assigned yet
        return None
