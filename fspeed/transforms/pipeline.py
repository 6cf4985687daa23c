"""Pipeline parallelism: a sequential loss in stages, each on a rank, and a schedule of microbatches through them."""
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fspeed.grad import in_torch_func, in_trace, watched
from fspeed.layer import Sequential
from fspeed.opened import Opened
from fspeed.shard.mesh import Axis, Mesh
from fspeed.shard.messages import Mailbox
from fspeed.shard.piece import Absent, Piece, Stage, is_gone
from fspeed.shard.pytree import tree_flatten, tree_unflatten
from fspeed.shard.schedules import Proof, Schedule, Schedules, check, one_f_one_b
from fspeed.step import Batch, Grads, State, Step, outside, over, placed, value_and_grad
from fspeed.transforms._run import run
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

    def base(loss: Opened, state: State, batch: Batch, grad: bool = True):
        refuse_call(state, batch)
        if loss.weights is not None:            # all ranks of the axis have the same batch, and one of them the loss
            loss = replace(loss, weights={name: weight / ax.size for name, weight in loss.weights.items()})
        return run(loss, state, batch, proof, cut(sizes_of(state.params)), ax, grad)

    def tied(inner: Grads) -> Grads:
        def summed(loss: Opened, state: State, batch: Batch):
            metrics, grads = inner(loss, state, batch)
            return metrics, None if grads is None else sum_ties(grads, cut(sizes_of(grads)).owners, ax)

        return summed

    label = f"{proof.stages} stages over {ax.name!r} ({ax.size})"
    stages = outside(step, tied, place=placed(step, label, BySizes(place)), axes=over(step, ax), base=base,
                     value=functools.partial(base, grad=False))
    return outside(stages, unwrapped)


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


# ---------------------------------------------------------------- where groups are
def unwrapped(inner: Grads) -> Grads:
    """A wrapper under which groups are without the `Piece`s that say whose they are; gradients get them back."""
    def run(loss: Opened, state: State, batch: Batch):
        if loss.views:                          # what stands outside has to be seen through before
            return inner(loss.through(lambda name, piece: (piece.value, functools.partial(owned, piece))), state, batch)
        metrics, grads = inner(loss, state._replace(params=state.params.map(lambda name, piece: piece.value)), batch)
        return metrics, None if grads is None else state.params.map(lambda name, piece, g: owned(piece, g), grads)

    return run


def owned(piece: Piece, grads: Any) -> Piece:
    """Gradients of what a piece has, in its place."""
    return Piece(grads, piece.axis, piece.holders, piece.layout)


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
