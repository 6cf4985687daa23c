"""Pipeline parallelism: a sequential loss in stages, each on a rank, and a schedule of microbatches through them."""
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fspeed.grad import in_torch_func, in_trace, watched
from fspeed.layer import Sequential
from fspeed.opened import Late, Later, Opened
from fspeed.shard.mesh import Axis, Mesh
from fspeed.shard.messages import Mailbox
from fspeed.shard.piece import Absent, Piece, Stage, at_least_float32, is_gone, live, live_form, parted
from fspeed.shard.pytree import tree_flatten, tree_map, tree_unflatten
from fspeed.shard.schedules import Action, Proof, Schedule, Schedules, check, one_f_one_b
from fspeed.step import Batch, Grads, State, Step, at_each_use, outside, over, placed, value_and_grad
from fspeed.transforms._microbatches import split
from fspeed.transforms._post import Post
from fspeed.transforms._stages import Stages, balanced, by_elements, staged
from fspeed.tree import BySizes, Groups


def pipeline(
    step: Step, mesh: Mesh, *, microbatches: int, axis: str = "pipe",
    schedule: Schedules | Schedule | Sequence[Sequence[Any]] = one_f_one_b, costs: Sequence[float] | None = None,
    cuts: Sequence[int] | None = None,
) -> Step:
    """Same in and out as the step; parts of the loss, and their parameters and moments, are on different ranks of an axis.

        g = sum over microbatches of d total / d params, over the sum of their weights

    Each rank does what the schedule lists for it: it takes what the stage before made of a microbatch, and hands on what its own
    made; backward goes the other way. Loss and metrics are the same on all ranks.

    Args:
        step: a step whose loss is made by `fs.sequential`, with `layers=loss.names`. Parts pass on any pytree, whose shapes may
            change from one microbatch to the next.
        mesh: from `fs.mesh`; over gloo.
        microbatches: m, how many; rows are divided as evenly as may be, and some may be empty.
        axis: the mesh axis of the stages. All its ranks are given the same batch.
        schedule: `gpipe`, `one_f_one_b`, `interleaved(chunks)`, `zero_bubble` of `fspeed.shard.schedules`, or one of your own:
            a function (ranks, m) -> Schedule, or for each rank a list of (kind, stage, microbatch). It is proved here.
        costs: what each part costs, to cut stages by; by default its number of parameters.
        cuts: the first part of each stage but the first, to cut by hand.

    Returns:
        A step whose state holds, of layers, those of this rank's stages. A layer that several stages use is on all their ranks,
        and its gradients are summed over them.

    Raises:
        TypeError: the loss is not made by `fs.sequential`.
        ValueError: the schedule is wrong or never ends; more stages than parts; a part is no layer; wrong cuts or costs.
        RuntimeError: when called: somebody differentiates or traces the step.
        CollectiveError: when called: a rank died, or did not answer within the timeout of its group.

    Cost: a rank sends, for each microbatch, what its stages hand on and, back, the gradient of what they were given, 8 bytes with
        each, and its form once; for a layer on k ranks, k - 1 times its gradients a step; and the last stage the metrics. It
        holds its schedule's live activations, and sums of gradients in at least float32. Idle slots are the schedule's.
        W costs what I does on top of its own: it goes through the stage again; under `checkpoint` it recomputes again.

    Source: see `fspeed.shard.schedules`.

    >>> from fspeed import optim
    >>> from fspeed.layer import sequential
    >>> from fspeed.loss import mean
    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.step import step
    >>> loss = sequential([("a", lambda p, x, batch, key: p * batch), ("b", lambda p, x, batch, key: mean(p * x))])
    >>> s = pipeline(step(loss, optim.sgd(1.), layers=loss.names), mesh(pipe=1), microbatches=2)
    >>> s.params(s(s.init({"a": torch.tensor(1.), "b": torch.tensor(1.)}), torch.tensor([1., 3.]))[0])
    {'a': tensor(-1.), 'b': tensor(-1.)}
    """
    ax = replace(mesh.axis(axis), splits_batch=False)
    loss = sequential_of(step, mesh, ax, microbatches)
    made = schedule(ax.size, microbatches) if callable(schedule) else schedule
    proof = check(made, microbatches)
    if len(proof.schedule.ranks) != ax.size:
        raise ValueError(f"pipeline: the schedule is for {len(proof.schedule.ranks)} ranks, but axis {axis!r} has {ax.size}")
    cut = cutter(loss, proof, costs, cuts)

    def place(sizes: dict[str, int]) -> Callable[[str, Any], Any]:
        owners = cut(tuple(sizes.items())).owners

        def put(name: str, group: Any) -> Any:
            who = owners.get(name, tuple(range(ax.size)))
            return Piece(group, ax, len(who), Stage(who)) if ax.rank in who else Absent(ax, Stage(who))

        return put

    def view(name: str, piece: Piece):
        return piece.value, lambda grads: Piece(grads, piece.axis, piece.holders, piece.layout)

    def base(loss: Opened, state: State, batch: Batch):
        return run(loss, state, batch, proof, cut(sizes_of(state.params)), ax)

    def value(loss: Opened, state: State, batch: Batch):
        return run(loss, state, batch, proof, cut(sizes_of(state.params)), ax, grad=False)[0], None

    def tied(inner: Grads) -> Grads:
        def summed(loss: Opened, state: State, batch: Batch):
            metrics, grads = inner(loss, state, batch)
            return metrics, None if grads is None else sum_ties(grads, cut(sizes_of(grads)).owners, ax)

        return summed

    label = f"{proof.stages} stages over {ax.name!r} ({ax.size})"
    stages = outside(step, tied, place=placed(step, label, BySizes(place)), axes=over(step, ax), base=base, value=value)
    return outside(stages, at_each_use(view))


def cutter(
    loss: Sequential, proof: Proof, costs: Sequence[float] | None, cuts: Sequence[int] | None
) -> Callable[[tuple[tuple[str, int], ...]], Stages]:
    """From the sizes of groups to stages."""
    parts, stages = len(loss.parts), proof.stages
    if parts < stages:
        raise ValueError(f"pipeline: {stages} stages of {parts} parts; give fs.sequential more parts, or the schedule fewer stages")
    if costs is not None and (len(costs) != parts or cuts is not None):
        raise ValueError(f"pipeline: costs= has {len(costs)} numbers for {parts} parts; give one a part, or cuts= alone")
    if cuts is not None and (len(cuts) != stages - 1 or sorted({0, *cuts, parts}) != [0, *cuts, parts]):
        raise ValueError(f"pipeline: cuts={list(cuts)}: give {stages - 1} rising numbers in 1 to {parts - 1}: first parts")

    @functools.cache
    def cut(sizes: tuple[tuple[str, int], ...]) -> Stages:
        elements = by_elements(loss, dict(sizes))
        return staged(loss, proof, balanced(costs or elements, stages) if cuts is None else cuts)

    return cut


def sizes_of(groups: Groups) -> tuple[tuple[str, int], ...]:
    """(name, how many elements) of all groups, wherever they are."""
    return tuple((name, sum(math.prod(leaf.shape) for leaf in groups.leaves(name))) for name in groups.names)


# ---------------------------------------------------------------- what cannot be
def sequential_of(step: Step, mesh: Mesh, ax: Axis, microbatches: Any) -> Sequential:
    """The loss of a step; raise if it cannot be cut, or the axis not carry it."""
    if not isinstance(step.loss, Sequential):
        raise TypeError(
            f"pipeline: the loss is a {type(step.loss).__name__}, which cannot be cut; make it by fs.sequential([(name, fn), ...])"
        )
    if step.base is not value_and_grad:
        raise ValueError("pipeline: the loss of this step is in stages already; make one pipeline of it, over one axis")
    if loose := [n for n in step.loss.names if not step.layers(n)]:
        raise ValueError(f"pipeline: part {loose[0]!r} of the loss is no layer; pass layers=loss.names to fs.step")
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"pipeline: microbatches must be a positive integer, got {microbatches!r}")
    if mesh.device != "cpu" and ax.size > 1:
        raise NotImplementedError(f"pipeline: axis {ax.name!r} is over {mesh.device}; messages between stages go over gloo so far")
    return step.loss


def refuse_call(state: State, batch: Batch) -> None:
    """Raise if somebody watches, or the state is of another kind."""
    if in_trace():
        raise RuntimeError("a pipeline's messages are no part of a graph; compile its layers: fs.jit(step, scope='layer')")
    if in_torch_func() or watched(state, batch.data):
        raise RuntimeError("a pipeline cannot be differentiated or batched: what its ranks send is unknown to autograd")
    if not is_gone(state.buffers):
        raise TypeError("a loss made by fs.sequential takes no buffers; keep them in the parameters, with trainable=")


# ---------------------------------------------------------------- a schedule, done
def run(
    loss: Opened, state: State, batch: Batch, proof: Proof, stages: Stages, ax: Axis, grad: bool = True
) -> tuple[dict[str, Any], Any]:
    """Do what a schedule lists for this rank, or the forwards of it: metrics, zeros but on the last stage's rank; and gradients.

    Gradients come home past autograd, through `late`, which sums them over microbatches and stages.
    """
    refuse_call(state, batch)
    late, post, micros = Late(at_least_float32), Post(proof, ax), split(batch, proof.microbatches)
    loss = replace(loss, views=(past, *loss.views), late=late)
    last, kept, found = proof.stages - 1, {}, []
    for a in proof.schedule.ranks[ax.rank]:
        if not grad and a.kind != "F":
            continue
        with torch.profiler.record_function(f"pipeline {a}"):
            at = a.stage, a.micro
            if a.kind == "F":
                x = post.take(Action("F", a.stage - 1, a.micro)) if a.stage else None
                f = functools.partial(through, loss, state, stages, a.stage, micros[a.micro])
                out, made = forward(f, state.params, x, grad)
                if a.stage == last:
                    found.append(out)
                else:
                    post.give(a, out)
                if grad:
                    kept[at] = made
                continue
            if a.kind != "W":
                outs, xs, params, _ = kept[at]
                cts = [(torch.ones_like(outs[0]) * loss.seed).to(outs[0].dtype)] if a.stage == last else None
                cts = post.take(Action("I", a.stage + 1, a.micro)) if cts is None else cts
                late.muted = a.kind == "I"
                grads = pulled(outs, cts, [*xs, *(params if a.kind == "B" else ())], again=a.kind == "I")[: len(xs)]
                late.muted = False
                kept[at] = outs, xs, params, cts
                if a.stage:
                    post.give(a._replace(kind="I"), grads)
            if a.kind != "I":
                outs, _, params, cts = kept.pop(at)
                if a.kind == "W":
                    pulled(outs, cts, params)
                del outs, params, cts
    metrics = post.share(functools.reduce(functools.partial(tree_map, torch.add), found) if found else None)
    post.close()
    late.arrive()
    return metrics, state.params.map(lambda name, group: live_form(group)(late.home.get(name) or zeros(group)))


def past(name: str, stored: Any):
    """A view that changes nothing, and whose gradients come home past autograd."""
    return stored, lambda grads: Later(lambda: grads)


def through(loss: Opened, state: State, stages: Stages, stage: int, batch: Batch, params: Groups, x: Any) -> Any:
    return loss.stage(state._replace(params=params), batch, x, *stages.spans[stage])


def forward(f: Callable[[Groups, Any], Any], params: Groups, x: Any, grad: bool) -> tuple[Any, tuple]:
    """What a stage makes of x; and, to pull back, its differentiable results, and x and parameters as autograd knows them."""
    given, spec = tree_flatten(x)
    xs = [t.detach().requires_grad_(grad) if real(t) else t for t in given]
    parts = parted(params)
    ps = [p.detach().requires_grad_(grad) for p in parts.leaves]
    with torch.set_grad_enabled(grad):
        out = f(parts.whole(ps), tree_unflatten(spec, xs))
    metrics = isinstance(out, dict) and isinstance(out.get("loss"), tuple) and hasattr(out["loss"], "total")
    outs = [out["loss"].total] if metrics else [t for t in tree_flatten(out)[0] if real(t)]
    return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out), (outs, [t for t in xs if real(t)], ps, None)


def real(t: Any) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())


def pulled(outs: Sequence[Tensor], cts: Sequence[Tensor], to: Sequence[Tensor], again: bool = False) -> list[Tensor]:
    """The gradients of outs, given their cotangents; `again`: what is kept will be needed once more."""
    pairs = [(o, c) for o, c in zip(outs, cts, strict=True) if o.requires_grad]
    if not pairs or not to:
        return [torch.zeros_like(t) for t in to]
    heads, cotangents = map(list, zip(*pairs, strict=True))
    return list(torch.autograd.grad(heads, to, cotangents, retain_graph=again, materialize_grads=True))


def zeros(group: Any) -> list[Tensor]:
    return [torch.zeros(x.shape, dtype=at_least_float32(x.dtype), device=x.device) for x in live(group)]


def sum_ties(grads: Groups, owners: dict[str, tuple[int, ...]], ax: Axis) -> Groups:
    """Gradients with those of layers on several ranks summed over them, in the order of the ranks."""
    box = Mailbox(ax)

    def summed(name: str, group: Any) -> Any:
        others = [r for r in owners.get(name, ()) if r != ax.rank]
        leaves, spec = tree_flatten(group)
        sent = [box.send(leaves, r, tag=1) for r in others]
        parts = {ax.rank: leaves, **{r: box.receive(r, tag=1) for r in others}}
        for s in sent:
            box.finish(s)
        total = [functools.reduce(torch.add, xs) for xs in zip(*(parts[r] for r in sorted(parts)), strict=True)]
        return tree_unflatten(spec, total)

    return grads.map(summed)
