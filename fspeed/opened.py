"""A loss on stored groups, as data: views through which groups become usable, and wrappers round every layer.

A *view* makes a stored group usable, or `Later` it, and says how gradients come home:

    usable, pull = view(name, stored);    pull(gradient of usable) = gradient of stored, or `Later` it

A gradient that comes later goes home past autograd: backward goes on meanwhile, and `Late` has it in the end.

A *wrapper* `wrap(fn, at)` goes round every opened layer, outside all views.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace, vjp
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
    late: "Late | None" = None                              # takes gradients that come later; None: they are waited for

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
        return lambda name, stored: stored if not self.views and name in plain else see(self.views, name, stored, self.late)

    def opener(self, state: Any, key: Key | None) -> Callable:
        index = {n: i for i, n in enumerate(n for n in state.params.names if n != ROOT)}
        see = self.see(state)

        def open(fn: Callable, names: Any) -> Callable:
            i = index[names[0] if isinstance(names, tuple) else names]
            own = None if key is None else functools.partial(fold_in, key.data, -1 - i)
            return self.around(Opening(fn, names, see), At(names, i, len(index), state.step, own))

        return open

    def stage(self, state: Any, batch: Any, x: Any, start: int, stop: int) -> Any:
        """What parts start to stop of a `Sequential` make of x: after the last one, the metrics of a batch."""
        loss: Any = self.loss
        key = self.key(state, batch.rows)
        open = self.opener(state, key)
        get = lambda name: Handle(name, state.params[name], open)
        out = loss.run(get, x, self.prepare(batch.data), key, start, stop)
        return as_metrics(out, batch.rows, (), self.weights) if stop == len(loss.parts) else out

    def __call__(self, state: Any, batch: Any) -> dict[str, Any]:
        """The metrics of a batch: {"loss": Loss, ...}."""
        key = self.key(state, batch.rows)
        open = self.opener(state, key)
        usable = {n: self.see(state)(n, g) if n == ROOT else Handle(n, g, open) for n, g in state.params.items()}
        params = join(state.params.skeleton, usable)
        buffers = () if is_gone(state.buffers) else (state.buffers,)
        return as_metrics(self.loss(params, self.prepare(batch.data), key, *buffers), batch.rows, state.buffers, self.weights)


# ---------------------------------------------------------------- views
def see(views: tuple[View, ...], name: str, stored: Any, late: "Late | None" = None) -> Any:
    """A stored group as a loss sees it: through all views, the gradient's way home being the views' own."""
    if not views:
        return thaw(stored)
    if in_torch_func() or not live(stored):
        return thaw(settled(through(views, name, stored)[0]))
    seen = []

    def run(*xs: Tensor):
        usable, pull = through(views, name, replace_live(stored, xs))
        usable = settled(usable)
        back, like = live_form(usable), [(x.shape, x.dtype, x.device) for x in xs]
        seen.append(usable)

        def home(cotangents):
            grads = pull(back(cotangents))
            return late.take(name, grads, like) if late is not None and isinstance(grads, Later) else live(settled(grads))

        return live(usable), home

    outs = _See.apply(run, *live(stored))
    return thaw(replace_live(seen.pop(), outs))


def through(views: tuple[View, ...], name: str, stored: Any) -> tuple[Any, Callable[[Any], Any]]:
    """All views of a group as one."""
    pulls = []
    for view in views:
        stored, pull = view(name, settled(stored))
        pulls.append(pull)
    return stored, lambda cotangent: functools.reduce(passed, reversed(pulls), cotangent)


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


# ---------------------------------------------------------------- gradients that come later
@dataclass(frozen=True)
class Later:
    """What a pull gives when its result is under way: `wait()`, once, is the result."""
    wait: Callable[[], Any]


def settled(x: Any) -> Any:
    """x, waited for if it comes later."""
    return x.wait() if isinstance(x, Later) else x


def passed(cotangent: Any, pull: Callable[[Any], Any]) -> Any:
    """pull(cotangent), which comes later if the cotangent does."""
    return Later(lambda: settled(pull(cotangent.wait()))) if isinstance(cotangent, Later) else pull(cotangent)


def in_turn(start: Callable[[str, Any], Any], groups: Any) -> Any:
    """start(name, group) of all groups, each waited for once the next has started: at most two are under way.

    >>> from fspeed.tree import cut
    >>> whole = cut({"w": torch.ones(2)})
    >>> in_turn(lambda name, group: Later(lambda: {"w": group["w"] + 1}), whole)["root"]
    {'w': tensor([2., 2.])}
    """
    done: list[Any] = []

    def next_one(name: str, group: Any) -> None:
        done.append(start(name, group))
        done[-2:-1] = map(settled, done[-2:-1])

    groups.map(next_one)
    done[-1:] = map(settled, done[-1:])
    found = iter(done)
    return groups.map(lambda name, group: next(found))


class Late:
    """Gradients of stored groups that come home past autograd, one group at a time being under way.

    Autograd is handed zeros without memory in their place, so whatever it does with them, at any depth, reads nothing.
    """

    def __init__(self, sums: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype):
        self.sums = sums                        # from a stored leaf's dtype to that in which its gradients are added
        self.coming: tuple[str, Later, list] | None = None
        self.home: dict[str, list[Tensor]] = {}
        self.owned: set[str] = set()            # groups whose sums nobody else has
        self.zeros: list[Tensor] = []
        self.muted = False                      # whether what comes is dropped: it will come again

    def take(self, name: str, grads: Later, like: list) -> list[Tensor]:
        """Zeros of the shapes, dtypes and devices that stored leaves have; the gradients of the group before are waited for."""
        self.arrive()
        if self.muted:
            grads.wait()
        else:
            self.coming = name, grads, [self.sums(dtype) for _, dtype, _ in like]
        zeros = [torch.zeros((), dtype=dtype, device=device) for _, dtype, device in like]
        self.zeros += zeros
        return [zero.expand(shape) for zero, (shape, _, _) in zip(zeros, like, strict=True)]

    def arrive(self) -> None:
        """Wait for the gradients under way; a group that was used before adds them to those that it has."""
        if self.coming is None:
            return
        (name, grads, dtypes), self.coming = self.coming, None
        new = [g.to(dtype) for g, dtype in zip(live(grads.wait()), dtypes, strict=True)]
        if name not in self.home:
            self.home[name] = new
        else:
            add = torch.Tensor.add_ if name in self.owned and not in_trace() else torch.add
            self.home[name] = list(map(add, self.home[name], new))
            self.owned.add(name)

    def into(self, grads: Any) -> Any:
        """Autograd's gradients, with those that came past it."""
        self.arrive()
        nothing = {x.untyped_storage().data_ptr() for x in self.zeros}
        both = lambda past, g: past if g.untyped_storage().data_ptr() in nothing else past + g
        put = lambda name, group: replace_live(group, map(both, self.home[name], live(group)))
        return grads.map(lambda name, group: put(name, group) if name in self.home else group)
