"""A pipeline's schedule, done: forward and backward of this rank's stages, on microbatches."""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.opened import Late, Later, Opened
from fspeed.shard.mesh import Axis
from fspeed.shard.piece import at_least_float32, live, live_form, replace_live
from fspeed.shard.pytree import tree_flatten, tree_map, tree_unflatten
from fspeed.shard.schedules import Action, Proof
from fspeed.step import Batch, State
from fspeed.transforms._microbatches import split
from fspeed.transforms._post import Post
from fspeed.transforms._stages import Stages


class Made(NamedTuple):
    """A stage's live activation: what is differentiated of its results and of what it was given; then cotangents of the results."""
    outs: list[Tensor]
    xs: list[Tensor]
    cts: Sequence[Tensor] = ()


def run(
    loss: Opened, state: State, batch: Batch, proof: Proof, stages: Stages, ax: Axis, grad: bool = True
) -> tuple[dict[str, Any], Any]:
    """Do what a schedule lists for this rank, or the forwards of it: metrics, zeros but on the last stage's rank; and gradients.

    Autograd adds up each leaf's gradients as it makes them; those that come later, or are too short to be added, `late` adds up.
    """
    leaves = {name: [x.detach().requires_grad_(grad) for x in live(group)] for name, group in state.params.here()}
    seen = state._replace(params=state.params.map(lambda name, group: replace_live(group, leaves[name])))
    short = any(at_least_float32(x.dtype) != x.dtype for xs in leaves.values() for x in xs)
    late = Late(at_least_float32)
    loss = replace(loss, late=late, views=(past, *loss.views) if short else loss.views)
    post, micros, last = Post(proof, ax), split(batch, proof.microbatches), proof.stages - 1
    made: dict[tuple[int, int], Made] = {}
    metrics: list[Any] = []

    def forward(a: Action) -> None:
        given, spec = tree_flatten(post.take(Action("F", a.stage - 1, a.micro)) if a.stage else None)
        xs = [x.detach().requires_grad_(grad) if real(x) else x for x in given]
        with torch.set_grad_enabled(grad):
            out = loss.stage(seen, micros[a.micro], tree_unflatten(spec, xs), *stages.spans[a.stage])
        outs = [out["loss"].total] if a.stage == last else list(filter(real, tree_flatten(out)[0]))
        if grad:
            made[a.stage, a.micro] = Made(outs, list(filter(real, xs)))
        out = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
        if a.stage == last:
            metrics[:] = [tree_map(torch.add, *metrics, out) if metrics else out]
        else:
            post.give(a, out)

    def backward(a: Action) -> None:
        one = made.pop((a.stage, a.micro))
        if a.kind != "W":
            seed = lambda total: (torch.ones_like(total) * loss.seed).to(total.dtype)
            cts = [seed(one.outs[0])] if a.stage == last else post.take(Action("I", a.stage + 1, a.micro))
            one = one._replace(cts=cts)
        params = [] if a.kind == "I" else [x for name in stages.names[a.stage] for x in leaves[name]]
        late.muted = a.kind == "I"
        pull(one, [*params, *(one.xs if a.kind != "W" else [])], again=a.kind == "I")
        late.arrive()
        for x in (x for name in late.home for x in leaves[name]):
            x.grad = None                       # zeros, in the place of what came later
        if a.kind == "I":
            made[a.stage, a.micro] = one
        if a.kind != "W" and a.stage:
            post.give(a._replace(kind="I"), [torch.zeros_like(x) if x.grad is None else x.grad for x in one.xs])

    def grads(name: str, group: Any) -> Any:
        found = late.home.get(name) or [x.grad for x in leaves[name]]
        nothing = lambda x: torch.zeros(x.shape, dtype=at_least_float32(x.dtype), device=x.device)
        return live_form(group)(nothing(x) if g is None else g for x, g in zip(leaves[name], found, strict=True))

    for a in proof.schedule.ranks[ax.rank]:
        if grad or a.kind == "F":
            with torch.profiler.record_function(f"pipeline {a}"):
                (forward if a.kind == "F" else backward)(a)
    total = post.share(*metrics)
    post.close()
    return total, state.params.map(grads) if grad else None


def past(name: str, stored: Any):
    """A view that changes nothing, and whose gradients come home past autograd."""
    return stored, lambda grads: Later(lambda: grads)


def real(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def pull(made: Made, to: list[Tensor], again: bool) -> None:
    """Add to the gradients of leaves those of a stage's results; `again`: what autograd keeps will be needed once more."""
    pairs = [(o, c) for o, c in zip(made.outs, made.cts, strict=True) if o.requires_grad]
    if pairs and to:
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs], retain_graph=again, inputs=to)
