"""Compiled steps: the whole of a step, collectives and optimizer included, as one graph."""
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fspeed.graph.compiled import BACKENDS, Backend, compiled
from fspeed.graph.layer import compiled_layer
from fspeed.step import Calls, Step, given, inside, on_loss, value_and_grad
from fspeed.transforms.donate import donate as donated


def jit(
    step: Step, *, donate: bool = False, scope: str = "step", backend: str | Backend = "inductor", limit: int = 8
) -> Step:
    """Same in and out as the step, compiled: forward, backward, collectives and update as one graph.

    The graph is what the step does on fake tensors, transforms, custom backwards and collectives included; Python code is never
    read. It applies to the whole step wherever it stands in a stack. Under torch.func, and where the state or the batch is
    differentiated, the step runs as it was.

    Args:
        step: a step.
        donate: whether the state that is passed in is used up, as under `fs.donate`.
        scope: "step", or "layer": compile each layer of other shapes once, forward and backward, and leave the rest as it is;
            then compile time does not grow with depth.
        backend: "inductor"; "eager", the graph without a compiler; or a function (graph, fake inputs) -> (list of tensors ->
            list of tensors).
        limit: how many compilations of the step, and of `evaluate`, there may be. Each is told on stderr with what changed, and is a line in
            `compilations(step)`.

    Returns:
        A step. Its first call takes seconds to minutes; what the compiler made is kept on disk and found by the next run.

    Raises:
        TypeError: when called: the loss's Python looks at a tensor's value; the message has the line.
        RuntimeError: when called: over `limit` compilations; or with a state that was donated before.

    Cost: activations that cost only arithmetic are computed again in backward, as by torch.compile.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = jit(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)), backend="eager")
    >>> s.params(s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))[0])
    {'w': tensor(-2.)}
    """
    if scope not in ("step", "layer"):
        raise ValueError(f"jit: scope must be 'step' or 'layer', got {scope!r}")
    if not callable(backend) and backend not in BACKENDS:
        raise ValueError(f"jit: backend must be one of {', '.join(BACKENDS)} or a function, got {backend!r}")
    make = backend if callable(backend) else BACKENDS[backend]
    step = donated(step) if donate else step
    if scope == "layer":
        return inside(step, on_loss(lambda loss: loss.wrapped(compiled_layer(make, limit))))
    return replace(step, run=Compiled(make, limit))


class Compiled:
    """From a step's calls to compiled ones; `log` has a line for each compilation."""

    def __init__(self, backend: Backend, limit: int):
        self.log: list[str] = []
        self.compile = partial(compiled, backend=backend, log=self.log, limit=limit)

    def __call__(self, calls: Calls, step: Step) -> Calls:
        in_place, seeded = step.own is given, step.base is value_and_grad

        def train(state: Any, batch: Any, seed: Any = None) -> Any:
            if seed is None:
                return calls.train(state, batch)
            one = lambda total: torch.ops.fspeed.after(seed, total)
            return replace(step, base=partial(value_and_grad, one=one)).train(state, batch)

        run = self.compile(train, "the step", seeded=seeded, in_place=in_place)

        def marked(state: Any, batch: Any) -> Any:
            new = run(state, batch)
            state.params.written_over = new[0].params is not state.params
            return new

        return Calls(marked if in_place else run, self.compile(calls.measure, "evaluate"))


def compilations(step: Step) -> list[str]:
    """A line for each compilation of a step so far: what was compiled, in how long, and what had changed.

    >>> from fspeed import optim
    >>> from fspeed.step import step
    >>> compilations(jit(step(lambda p, batch, key: p["w"].sum(), optim.sgd(1.))))
    []
    """
    return list(getattr(step.run, "log", ()))
