"""ZeRO: every rank keeps a slice of every group, of its gradients and of its moments."""
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from fspeed.grad import in_torch_func, in_trace, watched
from fspeed.graph.regather import kept as kept_in_graph
from fspeed.opened import Later, View, passed, through
from fspeed.shard.mesh import Mesh
from fspeed.shard.piece import Piece, gather, live, scatter, shard, start_gather, start_scatter
from fspeed.step import Batch, Grads, State, Step, inside, once_a_step, outside, over, placed
from fspeed.transforms._ahead import Ahead
from fspeed.transforms._regather import Regathered


def zero_shard(step: Step, mesh: Mesh, *, axis: str = "data", stage: int = 3, persist: int = 0) -> Step:
    """Same in and out as the step; parameters, gradients and moments are divided over the ranks of an axis.

    Stage 1 gathers every group once a step and scatters its gradients once a step. Stage 2 gathers once and scatters at each
    use. Stage 3 gathers and scatters at each use: what a layer gathered is freed after it and gathered again for its
    backward, without computing anything again. What is in no layer (`layers=` of `fs.step`) is gathered at once. While a layer
    computes, in eager mode, the layer that followed it the last time is gathered, and gradients of the one before are reduced.

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
        A rank sends (N-1)/N times these elements a step: stage 1, 2P; stage 2, (1+m)P; stage 3, m(3L + 2R),
        less the last layer once in each microbatch where its backward follows at once (without `checkpoint`).
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
        return outside(step, gathered(lambda group: True, {}), **fields)
    small = lambda group: sum(x.numel() for x in live(group)) * ax.size <= persist
    return inside(outside(step, gathered(small if persist else lambda group: False, {}), **fields), regathered)


def gather_view(dtype: torch.dtype | None):
    """The view that gathers a flat shard, and scatters its gradients in a dtype."""
    def view(name: str, piece):
        usable = gather(piece) if watched(piece) or in_trace() else Later(start_gather(piece))
        return usable, home(piece, dtype)

    return view


def home(piece: Piece, dtype: torch.dtype | None):
    """The way home of a gathered group's gradients; it keeps the layout and no value."""
    layout = Piece((), piece.axis, piece.holders, piece.layout)
    return lambda g: scatter(g, layout, dtype) if watched(g) or in_trace() else Later(start_scatter(g, layout, dtype))


def on_reduce(wrapper) -> Any:
    """A wrapper made of the gather view that reduces in the dtype that the step asks for."""
    return lambda inner: lambda loss, state, batch: wrapper(gather_view(loss.reduce))(inner)(loss, state, batch)


def gathered(kept, orders: dict[bool, list[str]]) -> Any:
    """Groups that are `kept` are gathered once a step, the others at each use; gradients are scattered at each use.

    Gathers are under way before they are needed: the kept ones from the start, the next layer's while a layer is used. In what
    order layers are used is remembered in `orders`, with and without gradients. Views that stand outside take part.
    """
    def wrap(inner: Grads) -> Grads:
        def run(loss, state: State, batch: Batch):
            begin = begun(loss.views, loss.reduce)
            plain = not in_torch_func()             # else its derivative is lost
            once = {n: cache(begin(n, g)) for n, g in state.params.here() if plain and kept(g)}
            eager = plain and not in_trace()
            ahead = Ahead(begin, state.params, orders.get(loss.random, []) if eager else [])

            def view(name: str, stored: Any):
                if name not in once or in_torch_func():
                    return ahead(name, stored)
                usable, pull = once[name]()
                return (kept_in_graph(usable) if in_trace() else usable), pull

            out = inner(replace(loss, views=(view,)), state, batch)
            for finish in once.values():
                finish()
            if eager:
                orders[loss.random] = ahead.close()
            return out

        return run

    return wrap


def begun(views: tuple[View, ...], dtype: torch.dtype | None):
    """Views and a gather as one that can be started: (name, stored) -> a function that waits for (usable, pull)."""
    def begin(name: str, stored: Any):
        piece, pull = through(views, name, stored)
        back = home(piece, dtype)
        finish = partial(gather, piece) if watched(piece) or in_trace() else start_gather(piece)
        pulled = lambda grads: passed(back(grads), pull)        # it must not hold what was gathered
        return lambda: (finish(), pulled)

    return begin


def regathered(inner: Grads) -> Grads:
    """Layers whose usable parameters are freed after forward and made again for backward."""
    def run(loss, state: State, batch: Batch):
        slot = Regathered()
        try:
            return inner(loss.wrapped(slot.around), state, batch)
        finally:
            slot.drop()

    return run
