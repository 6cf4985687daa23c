"""Layers: the functions that every transform acts on, and losses made of a list of them."""
import functools
from collections.abc import Callable, Sequence
from typing import Any

from fspeed.shard.pytree import tree_leaves

Names = str | tuple[str, ...]


class Handle:
    """What a loss sees in place of a layer's parameters under a step: only a layer function opens it."""

    def __init__(self, name: str, stored: Any, open: Callable):
        self.name, self.stored, self.open = name, stored, open

    def _closed(self, what: str) -> TypeError:
        return TypeError(
            f"the parameters of layer {self.name!r} were {what} outside a layer function; they exist only inside one: "
            "pass them whole to a function made by fs.layer, or take this subtree out of layers="
        )

    def __getitem__(self, key):
        raise self._closed(f"indexed with [{key!r}]")

    def __iter__(self):
        raise self._closed("iterated over")

    def __len__(self):
        raise self._closed("counted")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._closed(f"asked for .{name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        handle = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise handle._closed(f"given to {getattr(func, '__name__', func)}")

    def __repr__(self) -> str:
        return f"<parameters of layer {self.name!r}>"


def _refused(operator: str) -> Callable:
    def run(self, *others):
        raise self._closed(f"used with {operator}")

    return run


for _operator in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs"):
    setattr(Handle, f"__{_operator}__", _refused(f"__{_operator}__"))


def layer(fn: Callable) -> Callable:
    """`fn(params, *args)` as a layer: the unit that transforms gather, cast, recompute, drop and cut by.

    On a plain tree it is `fn`. Under a step, when `params` is a subtree that `layers=` names (or a tuple of several), it
    is `fn` on what the step's transforms make of that subtree.

    Args:
        fn: a function of parameters first, then anything. Tensors that it uses should be arguments: under `checkpoint`, one
            that is differentiated and only closed over is an error.

    Returns:
        A function of `fn`'s signature.

    >>> import torch
    >>> scale = layer(lambda params, x: params["w"] * x)
    >>> scale({"w": torch.tensor(2.)}, torch.tensor(3.))
    tensor(6.)
    """
    @functools.wraps(fn)
    def run(params, *args, **kwargs):
        first = params[0] if isinstance(params, tuple) and params else params
        if not isinstance(first, Handle):
            return fn(params, *args, **kwargs)
        return first.open(fn, each(params, lambda h: h.name))(each(params, lambda h: h.stored), *args, **kwargs)

    return run


def each(x: Any, f: Callable) -> Any:
    """f of x, or of each in a tuple."""
    return tuple(map(f, x)) if isinstance(x, tuple) else f(x)


class Sequential:
    """A loss as a list of layers, which a pipeline can cut; see `sequential`."""

    def __init__(self, parts: Sequence[tuple[Names | list[str], Callable]]):
        self.parts = [(tuple(names) if isinstance(names, list) else names, fn) for names, fn in parts]
        self.names = list(dict.fromkeys(n for names, _ in self.parts for n in (names if isinstance(names, tuple) else (names,))))

    def __call__(self, params, batch, key):
        return self.run(functools.partial(lookup, params), None, batch, key)

    def run(self, get: Callable[[str], Any], x: Any, batch: Any, key: Any, start: int = 0, stop: int | None = None) -> Any:
        for i, (names, fn) in list(enumerate(self.parts))[start:stop]:
            x = layer(fn)(each(names, get), x, batch, None if key is None else key.fold_in(i))
        return x


def sequential(parts: Sequence[tuple[Names | list[str], Callable]]) -> Sequential:
    """A loss made of a list of layers: `x = fn(params, x, batch, key)` from None at first to an `fs.Loss` at last.

    Args:
        parts: pairs of a path in the parameter tree, or several, and a function. The same path twice is a tie. Each part is
            a layer: pass `layers=loss.names` to `fs.step`.

    Returns:
        A loss, `(params, batch, key) -> Loss`, with `.parts` and `.names`.

    >>> import torch
    >>> from fspeed.loss import mean
    >>> loss = sequential([("w", lambda p, x, batch, key: p * batch), ("b", lambda p, x, batch, key: mean((x + p) ** 2))])
    >>> loss({"w": torch.tensor(2.), "b": torch.tensor(1.)}, torch.tensor([1., 2.]), None).value()
    tensor(17.)
    """
    return Sequential(parts)


def lookup(tree: Any, path: str) -> Any:
    """The subtree at a path."""
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, (list, tuple)) else tree[key]
    return tree
