"""ZeRO: every rank keeps a slice of every group, of its gradients and of its moments."""
from typing import Any

import torch

from fspeed.grad import in_torch_func
from fspeed.opened import through
from fspeed.shard.mesh import Mesh
from fspeed.shard.piece import Piece, gather, live, scatter, shard
from fspeed.step import Batch, Grads, State, Step, at_each_use, inside, once_a_step, outside, over, placed
from fspeed.transforms._regather import Regathered


def zero_shard(step: Step, mesh: Mesh, *, axis: str = "data", stage: int = 3, persist: int = 0) -> Step:
    """Same in and out as the step; parameters, gradients and moments are divided over the ranks of an axis.

    Stage 1 gathers every group once a step and scatters its gradients once a step. Stage 2 gathers once and scatters at each
    use. Stage 3 gathers and scatters at each use: what a layer gathered is freed after it and gathered again for its
    backward, without computing anything again. What is in no layer (`layers=` of `fs.step`) is gathered at once.

    Args:
        step: a step.
        mesh: from `fs.mesh`.
        axis: the mesh axis to divide over; batches are split along it too.
        stage: 1, 2 or 3.
        persist: in stage 3, groups of at most so many elements are gathered once a step and kept, as in stage 2.

    Returns:
        A step whose state holds this rank's flat shards, the same in every stage, and whose `batch` is this rank's part.

    Raises:
        ValueError: no such stage or axis, or another transform of the step uses the axis.

    Cost: for P parameters, of which L in layers and R in the root, N ranks and m microbatches, between steps 1/N of all.
        A rank sends (N-1)/N times these elements a step: stage 1, 2P; stage 2, (1+m)P; stage 3, m(3L + 2R).
        During a step it holds beside them the gathered parameters: all in stages 1 and 2, one or two layers and the root in
        stage 3; and gradients: all in stage 1, 1/N and one layer's in stages 2 and 3.

    Source: Rajbhandari et al., arXiv 1910.02054.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.step import step
    >>> s = zero_shard(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)), mesh(data=1), stage=3)
    >>> s.params(s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))[0])
    {'w': tensor(-2.)}
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"zero_shard: stage must be 1, 2 or 3, got {stage!r}")
    ax = mesh.axis(axis)
    fields: dict[str, Any] = {
        "place": placed(step, f"flat shards over {ax.name!r} ({ax.size})", lambda name, group: shard(group, ax)),
        "axes": over(step, ax),
    }
    if stage == 1:
        return outside(step, on_reduce(once_a_step), **fields)
    if stage == 2:
        return outside(step, gathered_once(lambda group: True), **fields)
    small = lambda group: sum(x.numel() for x in live(group)) * ax.size <= persist
    step = outside(step, gathered_once(small) if persist else on_reduce(at_each_use), **fields)
    return inside(step, regathered)


def gather_view(dtype: torch.dtype | None):
    """The view that gathers a flat shard, and scatters its gradients in a dtype."""
    def view(name: str, piece):
        return gather(piece), home(piece, dtype)

    return view


def home(piece: Piece, dtype: torch.dtype | None):
    """The way home of a gathered group's gradients; it keeps the layout and no value."""
    layout = Piece((), piece.axis, piece.holders, piece.layout)
    return lambda grads: scatter(grads, layout, dtype)


def on_reduce(wrapper) -> Any:
    """A wrapper made of the gather view that reduces in the dtype that the step asks for."""
    return lambda inner: lambda loss, state, batch: wrapper(gather_view(loss.reduce))(inner)(loss, state, batch)


def gathered_once(kept) -> Any:
    """Groups that are `kept` are gathered once a step, the others at each use; gradients are scattered at each use."""
    def wrap(inner: Grads) -> Grads:
        def run(loss, state: State, batch: Batch):
            gather_at_use = gather_view(loss.reduce)
            once = () if in_torch_func() else [(n, g) for n, g in state.params.items() if kept(g)]     # else its derivative is lost
            whole = {name: through((*loss.views, gather_at_use), name, group)[0] for name, group in once}

            def view(name: str, piece):
                return (whole[name], home(piece, loss.reduce)) if name in whole else gather_at_use(name, piece)

            return inner(loss.through(view), state, batch)

        return run

    return wrap


def regathered(inner: Grads) -> Grads:
    """Layers whose usable parameters are freed after forward and made again for backward."""
    def run(loss, state: State, batch: Batch):
        slot = Regathered()
        return inner(loss.wrapped(slot.around), state, batch)

    return run
