"""A step is data; a transform maps a step to a step.

    state, batch --grads(base)--> metrics, gradients --update(apply)--> state

Both arrows are a wrapper and what it wraps. A transform wraps from outside or from inside, and nothing else.
"""
from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed import random
from fspeed.grad import closed_over, in_torch_func, in_trace, vjp, watched
from fspeed.loss import BUFFERS, ROWS, new_buffers
from fspeed.opened import At, Late, Opened, View, in_turn, through
from fspeed.shard.collectives import all_gather, psum
from fspeed.shard.mesh import Axis
from fspeed.shard.piece import only_live, parted
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_unflatten
from fspeed.tree import NONE, ROOT, BySizes, Groups, Place, chooser, cut, whole

Metrics = dict[str, Any]                                                    # name: Loss
Grads = Callable[[Opened, "State", "Batch"], tuple[Metrics, Any]]           # the metrics' sums, and gradients of the total
Update = Callable[[Any, "State"], tuple["State", dict[str, Tensor]]]        # the new state, and more metrics


class State(NamedTuple):
    """All that a training run is: pass it in, take the next one out, save it, restore it.

    Args:
        step: how often the step was called: int64.
        params: parameters as they are stored, `Groups`; `step.params(state)` gives the plain tree.
        opt_state: the bare optimizer's state, whatever the stack.
        buffers: what a loss updates beside gradients; `()` for none.
        key: int32 (2,), constant; each call folds `step` into it.
        extra: what transforms remember, by name.

    >>> import fspeed as fs
    >>> step = fs.step(lambda params, batch, key: fs.mean(params["w"] * batch), fs.optim.adam(1e-3))
    >>> state = step.init({"w": torch.tensor(0.)}, key=fs.random.key(7))
    >>> state.step, state.key
    (tensor(0), tensor([0, 7], dtype=torch.int32))
    """
    step: Tensor
    params: Groups
    opt_state: Any
    buffers: Any
    key: Tensor
    extra: dict[str, Any]


class Batch(NamedTuple):
    """A batch, and the place of each of its rows in the whole batch of all ranks.

    Args:
        data: a pytree of tensors whose first dim is the row.
        rows: int64 (rows,), each row's number in the whole batch; a step numbers them itself when it is given bare data.

    >>> import fspeed as fs
    >>> step = fs.step(lambda params, batch, key: fs.mean(fs.random.dropout(key, params["w"] * batch, 0.5)), fs.optim.sgd(1.))
    >>> state, whole = step.init({"w": torch.tensor(1.)}), torch.ones(8)
    >>> halves = [step(state, fs.Batch(whole[i:i + 4], torch.arange(i, i + 4)))[1]["loss"] for i in (0, 4)]
    >>> step(state, whole)[1]["loss"] == sum(halves) / 2
    tensor(True)
    """
    data: Any
    rows: Tensor


def value_and_grad(
    loss: Opened, state: State, batch: Batch, one: Callable[[Tensor], Tensor] = torch.ones_like
) -> tuple[Metrics, Any]:
    """The innermost gradient function: a loss's metrics, and the gradient of its total with respect to stored parameters.

    Backward starts from one(total) times the seed.
    """
    late = Late()
    opened = replace(loss, late=late)

    def total(params):
        metrics = opened(state._replace(params=params), batch)
        return metrics["loss"].total, metrics

    out, pull, metrics = vjp(total, state.params, [x for _, x in closed_over(loss.loss)], batch.data)
    return metrics, late.into(pull((one(out) * loss.seed).to(out.dtype)))


def value_only(loss: Opened, state: State, batch: Batch) -> tuple[Metrics, None]:
    """In place of `value_and_grad`, when only metrics are wanted: nothing is kept for backward, unless somebody outside asks."""
    closed = [x for _, x in closed_over(loss.loss)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and watched(state, batch, closed)):
        return loss(state, batch), None


class Calls(NamedTuple):
    """What a step runs: gradients(state, batch), then update(gradients, state); measure(state, batch) for `evaluate`."""
    gradients: Callable[[State, Any], tuple[dict[str, Tensor], Any, Tensor, Any]]
    update: Update
    measure: Callable[[State, Any], dict[str, Tensor]]


def copied(tree: Any) -> Any:
    """Memory of a step's own."""
    return tree_map(torch.clone, tree)


def given(tree: Any) -> Any:
    """The memory of a donated state."""
    return tree


@dataclass(frozen=True)
class Step:
    """A pure training step, `(state, batch) -> (state, metrics)`, as data; made by `fs.step`, changed by transforms.

    Attributes:
        loss: (params, batch, key) -> Loss.
        optimizer: optax's pair: init(params), update(grads, opt_state, params) -> (updates, opt_state).
        layers, trainable: which subtrees are layers, which leaves are trained: predicates on key paths.
        weights: batch -> {name: weight} of each term of the loss, if it has several.
        place: how a group comes to be stored: (in words, (name, group) -> stored group), innermost first.
        axes: the mesh axes that the step runs over, in the order of the mesh.
        extra: what transforms remember: (name, stored parameters -> initial value).
        reduce: the dtype that gradients are summed in over ranks; None: at least float32.
        grads, base: the wrapper of, and the innermost, gradient function.
        value: what stands in place of `base` when only metrics are wanted.
        update: the wrapper of `apply`, which runs the optimizer.
        own: how a step comes to own the parameters and moments that it writes over: a copy, or, donated, as they are.
        run: from its calls, and the step, to what is run in their place: compiled ones, under `jit`.

    >>> import fspeed as fs
    >>> step = fs.step(lambda params, batch, key: fs.mean((params["w"] - batch) ** 2), fs.optim.sgd(0.25))
    >>> state = step.init({"w": torch.tensor(0.)})
    >>> for _ in range(3):
    ...     state, metrics = step(state, torch.tensor([1., 3.]))
    >>> metrics["loss"], step.evaluate(state, torch.tensor([1., 3.]))["loss"]
    (tensor(1.2500), tensor(1.0625))
    """
    loss: Callable
    optimizer: Any
    layers: Callable[[str], bool] = NONE
    trainable: Callable[[str], bool] = lambda path: True
    weights: Callable[[Any], dict[str, Tensor]] | None = None
    place: tuple[Place, ...] = ()
    axes: tuple[Axis, ...] = ()
    extra: tuple[tuple[str, Callable[[Groups], Any]], ...] = ()
    reduce: torch.dtype | None = None
    grads: Callable[[Grads], Grads] = lambda base: base
    base: Grads = value_and_grad
    value: Grads = value_only
    update: Callable[[Update], Update] = lambda apply: apply
    own: Callable[[Any], Any] = copied
    run: Callable[[Calls, Any], Calls] = lambda calls, step: calls

    def __repr__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        stored = " then ".join(label for label, _ in self.place) or "whole"
        over = ", ".join(f"{a.name}={a.size}" for a in self.axes) or "one process"
        return f"Step(loss={name}, layers={self.layers}, params {stored}, over {over})"

    def init(self, params: Any, key: Tensor | None = None, buffers: Any = ()) -> State:
        """The first state.

        Args:
            params: a pytree of tensors and `fs.lazy` leaves, the same on every rank; it is left as it is.
            key: a raw key, int32 (2,); `fs.random.key(0)` by default.
            buffers: what the loss updates beside gradients; it then takes them as a fourth argument and returns them third.

        Returns:
            A `State`: this rank's part of it, if the step is sharded.

        Raises:
            ValueError: a leaf is no tensor, nothing is trainable, a pattern of `layers=` matches nothing, two leaves have one path.

        Cost: one whole group at a time beside what the caller holds.
        """
        if isinstance(params, State):
            raise TypeError("init takes a parameter tree, got a State; step.params(state) is a state's tree")
        key = random.key(0) if key is None else random._raw(key)
        stored = cut(params, self.layers, self.trainable, self.place, self.axes)
        return State(
            torch.zeros((), dtype=torch.int64), stored, self.optimizer.init(only_live(stored)), buffers,
            key, {name: start(stored) for name, start in self.extra},
        )

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Tensor]]:
        """One step: (state, batch) -> (state, metrics). The inputs are left as they were."""
        refuse_inference()
        self.check(state)
        metrics, grads, count, buffers = self.calls.gradients(state, batch)
        new, more = self.calls.update(grads, state)
        return new._replace(step=count, buffers=buffers), {**metrics, **more}

    @functools.cached_property
    def calls(self) -> Calls:
        """What a call and what `evaluate` run once the state is checked; compiled under `fs.jit`."""
        return self.run(Calls(self.gradients, self.update(self.apply), self.measure), self)

    def gradients(self, state: State, batch: Any) -> tuple[dict[str, Tensor], Any, Tensor, Any]:
        """The first half of a call: metrics, gradients, the next count and the next buffers."""
        metrics, grads = self._run(Opened(self.loss, self.reduce), self.base, state, batch)
        buffers = new_buffers(state.buffers, metrics)
        return values(metrics), grads, state.step + 1, buffers

    def measure(self, state: State, batch: Any) -> dict[str, Tensor]:
        """`evaluate` without its checks."""
        metrics, _ = self._run(Opened(self.loss, self.reduce, random=False), self.value, state, batch)
        return values({name: m for name, m in metrics.items() if name != BUFFERS})

    def value_and_grad(self, state: State, batch: Any) -> tuple[Metrics, Any]:
        """The whole batch's metrics, as `Loss`es, and mean gradients in the form and the place of the stored parameters."""
        refuse_inference()
        self.check(state)
        return self._run(Opened(self.loss, self.reduce), self.base, state, batch)

    def evaluate(self, state: State, batch: Any) -> dict[str, Tensor]:
        """The metrics of a batch, without gradients and with `key=None` for the loss: nothing random.

        Args:
            state, batch: as for a call.

        Returns:
            {name: value}.

        Cost: a forward pass; it gathers and sums over ranks what a step's forward does.
        """
        self.check(state)
        return self.calls.measure(state, batch)

    def params(self, state: State) -> Any:
        """The plain parameter tree, whole on every rank; call it on all of them."""
        return whole(state.params)

    def _run(self, loss: Opened, base: Grads, state: State, batch: Any) -> tuple[Metrics, Any]:
        batch, total = self.numbered(batch)
        seed = 1.0 if total is None or self.weights is not None else power_of_two_over(total)
        loss = replace(loss, seed=seed)
        if self.weights is not None:
            rows = torch.tensor(len(batch.rows), dtype=torch.float64, device=batch.rows.device)
            parts = {name: torch.as_tensor(weight, device=rows.device) for name, weight in self.weights(batch.data).items()}
            loss = replace(loss, weights=summed({**parts, ROWS: rows}, self.axes))
        metrics, grads = self.grads(base)(loss, state, batch)
        metrics = summed(metrics, self.axes)
        return metrics, divided(grads, metrics["loss"].weight * seed)

    def apply(self, grads: Any, state: State) -> tuple[State, dict[str, Tensor]]:
        """The optimizer's update, in one pass where the optimizer has one; what is differentiated goes its plain way."""
        parts = parted(state.params)
        params = parts.form(parts.leaves)
        one_pass = getattr(self.optimizer, "apply", None)
        if one_pass is None or in_torch_func():
            updates, opt_state = self.optimizer.update(grads, state.opt_state, params)
            params = tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)
        else:
            params, opt_state = one_pass(grads, self.own(state.opt_state), self.own(params))
        params = parts.whole(tree_leaves(params)) if parts.others else params
        return state._replace(params=params, opt_state=opt_state), {}

    # ------------------------------------------------------------ what comes in
    def numbered(self, batch: Any) -> tuple[Batch, int | None]:
        """The batch with its rows numbered, in the order of the mesh, and the number of all rows, where no device is asked for it.

        Cost: one small all-gather an axis that splits the batch.
        """
        n, device = rows_of(batch)
        axes = [a for a in self.axes if a.splits_batch and a.size > 1]
        if isinstance(batch, Batch):
            return batch, None if axes else n
        if not axes:
            return Batch(batch, torch.arange(n, device=device)), n
        start = torch.zeros((), dtype=torch.int64, device=device)
        count = torch.full((1,), n, dtype=torch.int64, device=device)
        for axis in reversed(axes):
            counts = all_gather(count, axis)
            start, count = start + counts[: axis.rank].sum(), counts.sum(0, keepdim=True)
        return Batch(batch, start + torch.arange(n, device=device)), int(count) if on_host(count) else None

    def check(self, state: Any) -> None:
        """Raise, before anything is sent, if a state is not this step's."""
        if not isinstance(state, State) or not isinstance(state.params, Groups):
            raise TypeError(f"a step takes a State first, got a {type(state).__name__}; step.init(params) makes one")
        if state.params.written_over:
            raise RuntimeError("this state was donated to a step, which wrote over it; use the state that the step returned")
        here, there = tuple(label for label, _ in self.place), state.params.placed
        if here != there:
            raise ValueError(
                f"this state comes from another stack: its parameters are {' then '.join(there) or 'whole'}, "
                f"this step keeps them {' then '.join(here) or 'whole'}; make it with this step's init, or save and restore it"
            )
        if not cut_by(self.layers, state.params.names):
            raise ValueError(
                f"this state was cut into {', '.join(state.params.names)}, not by this step's layers=; make it with this step's "
                "init, or save and restore it"
            )
        if set(state.extra) != {name for name, _ in self.extra}:
            raise ValueError(
                f"this state comes from another stack: its extra has {sorted(state.extra)}, "
                f"this step's transforms need {sorted(n for n, _ in self.extra)}"
            )


def step(
    loss: Callable, optimizer: Any, *, layers: str | Iterable[str] | Callable[[str], bool] = (),
    trainable: str | Iterable[str] | Callable[[str], bool] = "**", weights: Callable[[Any], dict[str, Tensor]] | None = None,
) -> Step:
    """A training step from a loss and an optimizer: what transforms take and return.

        g = d total / d params / weight;    params, opt_state = optimizer(g, opt_state, params)

    Args:
        loss: `(params, batch, key) -> Loss`, or `(Loss, {name: Loss})`. A bare scalar counts as the mean over its rows. `key`
            is a `fs.random.Key` that knows each row's place in the whole batch. It is None in `evaluate`, where nothing is random:
            `fs.random.dropout(None, x, rate)` is x, and a loss that calls `key.fold_in` asks `if key is not None` before.
        optimizer: optax's pair, init and update, such as `fs.optim.adamw(3e-4)`.
        layers: globs over key paths, or a predicate: which subtrees are layers, the units of gathering and recompute.
        trainable: globs or a predicate over leaves' paths; the other leaves get no gradient and no moments and keep their bits.

        weights: for a loss of several terms with masks of their own: batch -> {name: weight}, from the batch alone. The loss
            then returns {name: fs.Loss}, and each term is divided by its weight in the whole batch.

    Returns:
        A `Step`: `state = step.init(params)`, then `state, metrics = step(state, batch)`.

    Cost: as the same loop written by hand.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> s = step(lambda params, batch, key: mean((params["w"] - batch) ** 2), optim.sgd(0.25))
    >>> state, metrics = s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))
    >>> metrics["loss"], s.params(state)
    (tensor(5.), {'w': tensor(1.)})
    """
    if not callable(loss):
        raise TypeError(f"fs.step: loss must be a function (params, batch, key) -> fs.Loss, got a {type(loss).__name__}")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        got = optimizer.__name__ if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise TypeError(
            f"fs.step: optimizer must be a pair of functions, init and update, as fs.optim.adamw(1e-3) or optax's are; got {got}"
        )
    return Step(loss, optimizer, chooser(layers), chooser(trainable), weights)


def refuse_inference() -> None:
    """Raise in torch.inference_mode()."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a step needs gradients, which torch.inference_mode() forbids; only `evaluate` runs inside it")


@functools.lru_cache(maxsize=1024)
def cut_by(layers: Callable[[str], bool], names: tuple[str, ...]) -> bool:
    """Whether groups of these names may come from a tree cut by `layers`."""
    found = [name for name in names if name != ROOT]
    return all(map(layers, found)) and bool(found or layers == NONE)


def rows_of(batch: Any) -> tuple[int, torch.device]:
    """How many rows a batch has; ValueError if its leaves disagree."""
    leaves = [(p, x) for p, x in zip(tree_paths(batch), tree_leaves(batch), strict=True)]
    for path, x in leaves:
        if not isinstance(x, Tensor) or x.dim() == 0:
            what = "a 0-d tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"batch leaf {path or 'itself'!r} is {what}; every leaf must be a tensor whose first dim is the row")
    if not leaves:
        raise ValueError("the batch has no leaves; expected a pytree of tensors whose first dim is the row")
    if len({len(x) for _, x in leaves}) > 1:
        raise ValueError(f"batch leaves disagree on their rows: {', '.join(f'{p!r} has {len(x)}' for p, x in leaves)}")
    return len(leaves[0][1]), leaves[0][1].device


def summed(metrics: Metrics, axes: tuple[Axis, ...]) -> Metrics:
    """Metrics summed over mesh axes: one message an axis, in float64."""
    ranks = math.prod(a.size for a in axes)
    if ranks == 1:
        return metrics
    leaves, spec = tree_flatten(metrics)
    flat = torch.cat([x.to(torch.float64).reshape(-1) for x in leaves])
    form = zlib.crc32(repr([tuple(x.shape) for x in leaves] + tree_paths(metrics)).encode()) % 2**20
    mine = torch.tensor([form, form**2], dtype=torch.float64, device=flat.device)      # both means are one's own: all are equal
    message = torch.cat([mine, flat, flat.new_zeros(-(len(flat) + 2) % 16)])           # so that lengths seldom tell first
    forms, flat, _ = functools.reduce(psum, axes, message).split([2, len(flat), len(message) - len(flat) - 2])
    flat = alike(forms == ranks * mine, flat, metrics)
    parts = flat.split([x.numel() for x in leaves])
    return spec.unflatten([p.reshape(x.shape).to(x.dtype) for p, x in zip(parts, leaves, strict=True)])


def alike(same: Tensor, flat: Tensor, metrics: Metrics) -> Tensor:
    """Sums of metrics, where every rank has the same metrics; else an error, or NaN where asking would make the host wait."""
    if not on_host(same):
        return torch.where(same.all(), flat, torch.nan)
    if not same.all():
        raise ValueError(
            f"the ranks' losses returned different metrics, here {sorted(metrics)}; each rank must return the same names and "
            "buffers, whatever its rows: fs.Loss(torch.zeros(()), 0) counts for nothing"
        )
    return flat


def on_host(x: Tensor) -> bool:
    """Whether Python can look at a tensor without waiting for a device, and without losing a derivative or a place in a graph."""
    return x.device.type == "cpu" and not (in_torch_func() or in_trace() or x.requires_grad)


def power_of_two_over(total: int) -> float:
    """About one over a number of rows: what backward starts from. Being a power of two, it changes no bit of what it scales."""
    return 2.0 ** -max(total - 1, 0).bit_length()


def divided(grads: Any, by: Tensor) -> Any:
    """Gradients over a number, zero over zero; themselves where that is one, as for a mean over two to some power of rows."""
    if on_host(by) and by == 1:
        return grads
    by = torch.where(by == 0, torch.inf, by)
    leaves, spec = tree_flatten(grads)
    if in_torch_func() or in_trace() or not leaves:
        return tree_unflatten(spec, [g / by.to(g.dtype) for g in leaves])
    return tree_unflatten(spec, torch._foreach_div(leaves, by))


def values(metrics: Metrics) -> dict[str, Tensor]:
    """{name: Loss} -> {name: value}."""
    return {name: m.value() for name, m in metrics.items()}


# ---------------------------------------------------------------- how transforms are written
def outside(step: Step, wrap: Callable[[Grads], Grads], **fields: Any) -> Step:
    """The step with its gradient function wrapped from outside: `wrap(inner)` sees what is stored at its level."""
    return replace(step, grads=lambda base: wrap(step.grads(base)), **fields)


def inside(step: Step, wrap: Callable[[Grads], Grads], **fields: Any) -> Step:
    """The step with its innermost gradient function wrapped: `wrap(base)` sees what all other transforms hand on."""
    return replace(step, grads=lambda base: step.grads(wrap(base)), **fields)


def on_loss(change: Callable[[Opened], Opened]) -> Callable[[Grads], Grads]:
    """A wrapper that only changes the loss that it hands on."""
    return lambda inner: lambda loss, state, batch: inner(change(loss), state, batch)


def at_each_use(view: View) -> Callable[[Grads], Grads]:
    """A wrapper: stored groups are usable through view whenever they are used, and gradients come home then."""
    return on_loss(lambda loss: loss.through(view))


def once_a_step(view: View) -> Callable[[Grads], Grads]:
    """A wrapper: all groups are made usable before the loss, and gradients come home once, after it.

    Views that are pending from outside are due first.
    """
    def wrap(inner: Grads) -> Grads:
        def run(loss: Opened, state: State, batch: Batch):
            pulls: dict[str, Callable[[Any], Any]] = {}

            def use(name: str, group: Any) -> Any:
                usable, pulls[name] = through((*loss.views, view), name, group)
                return usable

            metrics, grads = inner(replace(loss, views=()), state._replace(params=in_turn(use, state.params)), batch)
            return metrics, None if grads is None else in_turn(lambda name, g: pulls[name](g), grads)

        return run

    return wrap


def around(step: Step, wrap: Callable[[Callable, At], Callable]) -> Step:
    """The step with every layer wrapped: `wrap(fn, at)`."""
    return outside(step, on_loss(lambda loss: loss.wrapped(wrap)))


def placed(step: Step, label: str, place: Callable[[str, Any], Any] | BySizes) -> tuple[Place, ...]:
    """The step's `place` field with one more: `place(name, group)`, said by label."""
    return (*step.place, (label, place))


def over(step: Step, axis: Axis) -> tuple[Axis, ...]:
    """The step's `axes` field with one more, in the order of the mesh; ValueError if it is there already."""
    if any(a.name == axis.name for a in step.axes):
        raise ValueError(f"axis {axis.name!r} is used by two transforms of one step; give each an axis of its own")
    return tuple(sorted((*step.axes, axis), key=lambda a: a.dim))
