"""A loss on stored groups, as data: views through which groups become usable, and wrappers round every layer.

A *view* makes a stored group usable and says how gradients come home:

    usable, pull = view(name, stored);    pull(gradient of usable) = gradient of stored

A *wrapper* `wrap(fn, at)` goes round every opened layer, outside all views.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, vjp
from fspeed.layer import Handle
from fspeed.loss import as_metrics
from fspeed.random import Key, fold_in
from fspeed.shard.piece import is_gone, live, live_form, replace_live, thaw
from fspeed.tree import ROOT, join

View = Callable[[str, Any], tuple[Any, Callable[[Any], Any]]]


@dataclass(frozen=True)
class At:
    """Where a layer stands and when: the same on every rank, in every microbatch and in recompute."""
    names: Any                          # its path, or a tuple of several
    index: int                          # among all layers
    depth: int                          # how many there are
    count: Tensor                       # calls of the step so far, int64
    key: Callable[[], Tensor] | None    # makes a raw key of its own; None when nothing may be random


class Opening:
    """A layer on stored parameters: fn(view(stored), *args)."""

    def __init__(self, fn: Callable, names: Any, see: Callable[[str, Any], Any]):
        self.fn, self.names, self.see = fn, names, see

    def view(self, stored: Any) -> Any:
        return tuple(map(self.see, self.names, stored)) if isinstance(self.names, tuple) else self.see(self.names, stored)

    def __call__(self, stored: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self.view(stored), *args, **kwargs)


@dataclass(frozen=True)
class Opened:
    """A loss on stored groups: it can be called, seen `through` views, `wrapped` layer by layer, and cut."""
    loss: Callable
    reduce: torch.dtype | None = None                       # what gradients are summed in; None: at least float32
    views: tuple[View, ...] = ()                            # the outermost transform's first
    around: Callable = lambda fn, at: fn                    # (fn, at) -> fn
    seed: Any = 1.0                                         # the cotangent that backward starts from: a number, or 0-d
    random: bool = True                                     # whether the loss gets a key
    weights: dict[str, Tensor] | None = None                # of each term of the loss, in the whole batch
    prepare: Callable = lambda batch: batch                 # what the loss sees of a batch's data

    def through(self, *views: View) -> "Opened":
        return replace(self, views=(*self.views, *views))

    def wrapped(self, wrap: Callable[[Callable, At], Callable]) -> "Opened":
        return replace(self, around=lambda fn, at: self.around(wrap(fn, at), at))

    def scaled(self, factor: Any) -> "Opened":
        return replace(self, seed=self.seed * factor)

    def key(self, state: Any, rows: Tensor) -> Key | None:
        return Key(fold_in(state.key, state.step), rows) if self.random else None

    def see(self, state: Any) -> Callable[[str, Any], Any]:
        """From a stored group, with its name, to what the loss sees of it."""
        plain = state.params.skeleton.plain
        return lambda name, stored: stored if not self.views and name in plain else see(self.views, name, stored)

    def opener(self, state: Any, key: Key | None) -> Callable:
        index = {n: i for i, n in enumerate(n for n in state.params.names if n != ROOT)}
        see = self.see(state)

        def open(fn: Callable, names: Any) -> Callable:
            i = index[names[0] if isinstance(names, tuple) else names]
            own = None if key is None else functools.partial(fold_in, key.data, -1 - i)
            return self.around(Opening(fn, names, see), At(names, i, len(index), state.step, own))

        return open

    def __call__(self, state: Any, batch: Any) -> dict[str, Any]:
        """The metrics of a batch: {"loss": Loss, ...}."""
        key = self.key(state, batch.rows)
        open = self.opener(state, key)
        usable = {n: self.see(state)(n, g) if n == ROOT else Handle(n, g, open) for n, g in state.params.items()}
        params = join(state.params.skeleton, usable)
        buffers = () if is_gone(state.buffers) else (state.buffers,)
        return as_metrics(self.loss(params, self.prepare(batch.data), key, *buffers), batch.rows, state.buffers, self.weights)


# ---------------------------------------------------------------- views
def see(views: tuple[View, ...], name: str, stored: Any) -> Any:
    """A stored group as a loss sees it: through all views, the gradient's way home being the views' own."""
    if not views:
        return thaw(stored)
    if in_torch_func() or not live(stored):
        return thaw(through(views, name, stored)[0])
    seen = []

    def run(*xs: Tensor):
        usable, pull = through(views, name, replace_live(stored, xs))
        back = live_form(usable)
        seen.append(usable)
        return live(usable), lambda cotangents: live(pull(back(cotangents)))

    outs = _See.apply(run, *live(stored))
    return thaw(replace_live(seen.pop(), outs))


def through(views: tuple[View, ...], name: str, stored: Any) -> tuple[Any, Callable[[Any], Any]]:
    """All views of a group as one."""
    pulls = []
    for view in views:
        stored, pull = view(name, stored)
        pulls.append(pull)
    return stored, lambda cotangent: functools.reduce(lambda c, pull: pull(c), reversed(pulls), cotangent)


class _See(torch.autograd.Function):
    """Views with the transpose that they give. One node, so that gradients keep the dtype that each pull gives them."""

    @staticmethod
    def forward(ctx, run, *xs):
        outs, ctx.pull = run(*xs)
        return tuple(x.detach() for x in outs)

    @staticmethod
    def backward(ctx, *cotangents):
        pull, ctx.pull = ctx.pull, None
        return None, *pull(cotangents)


def differentiable(fn: Callable[[str, Any], Any]) -> View:
    """A view from a differentiable function of a group; its way home is autograd's.

    >>> from fspeed.tree import cut
    >>> double = differentiable(lambda name, group: {"w": 2 * group["w"]})
    >>> usable, pull = double("root", {"w": torch.tensor(3.)})
    >>> usable, pull({"w": torch.tensor(1.)})
    ({'w': tensor(6.)}, {'w': tensor(2.)})
    """
    def view(name: str, stored: Any):
        usable, pull, _ = vjp(lambda g: (fn(name, g), None), stored)
        return usable, pull

    return view
