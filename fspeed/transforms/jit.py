"""Compiled steps: forward, backward and collectives as one graph, the update as another, or as the optimizer's own pass."""
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fspeed.graph.compiled import BACKENDS, Backend, compiled
from fspeed.graph.layer import compiled_layer
from fspeed.step import Calls, Step, given, inside, on_loss, value_and_grad
from fspeed.transforms._donated import donated


def jit(
    step: Step, *, donate: bool = False, scope: str = "step", backend: str | Backend = "inductor", limit: int = 8
) -> Step:
    """Same in and out as the step, compiled: forward, backward and collectives as one graph, then the update.

    The graph is what the step does on fake tensors, transforms, custom backwards and collectives included; Python code is never
    read. It applies to the whole step wherever it stands in a stack. Under torch.func, and where the state or the batch is
    differentiated, the step runs as it was. The update is a graph of its own, or, where the optimizer has a pass of its own
    (`apply`), that: it reads and writes each byte once, and its time to compile does not grow with the number of leaves.

    Args:
        step: a step.
        donate: whether the state that is passed in is used up, as under `fs.donate`.
        scope: "step", or "layer": compile each layer of other shapes once, forward and backward, and leave the rest as it is.
        backend: "inductor"; "eager", the graph without a compiler; or a function (graph, fake inputs) -> (list of tensors ->
            list of tensors).
        limit: how many compilations of each part there may be. Each is told on stderr with what changed, and is a line in
            `compilations(step)`.

    Returns:
        A step. Its first call takes seconds to minutes.

    Raises:
        TypeError: when called: the loss's Python looks at a tensor's value; the message has the line.
        RuntimeError: when called: over `limit` compilations; or with a state that was donated before.

    Cost: gradients see no `opt_state`, which would be passed in vain; a transform keeps what its `grads` reads in `extra`.
        Activations that cost only arithmetic are computed again in backward, as by torch.compile. Under ZeRO-3 each layer's
        gather starts a layer early, its reduction ends a layer late, and all but the last are gathered again for backward. What was
        compiled is kept on disk by Inductor, and found there by the next process. On a CPU, small models gain by Inductor's C++
        wrapper (`torch._inductor.config.cpp_wrapper = True`), which doubles the time to compile.

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
        log: list[str] = []
        wrap = compiled_layer(make, log, limit)
        return replace(inside(step, on_loss(lambda loss: loss.wrapped(wrap))), run=Logged(step.run, log))
    return replace(step, run=Compiled(make, limit))


@dataclass(frozen=True)
class Logged:
    """A step's calls as they were, beside a log of what is compiled inside them."""
    run: Callable
    mine: list[str]

    def __call__(self, calls: Calls, step: Step) -> Calls:
        return self.run(calls, step)

    @property
    def log(self) -> list[str]:
        return [*getattr(self.run, "log", ()), *self.mine]


class Compiled:
    """From a step's calls to compiled ones; `log` has a line for each compilation."""

    def __init__(self, backend: Backend, limit: int):
        self.log: list[str] = []
        self.compile = partial(compiled, backend=backend, log=self.log, limit=limit)

    def __call__(self, calls: Calls, step: Step) -> Calls:
        seeded = step.base is value_and_grad

        def gradients(state: Any, batch: Any, seed: Any = None) -> Any:
            if seed is None:
                return calls.gradients(state, batch)
            one = lambda total: torch.ops.fspeed.after(seed, total)
            return replace(step, base=partial(value_and_grad, one=one)).gradients(state, batch)

        return Calls(
            without_moments(self.compile(gradients, "the gradients", seeded=seeded)), self.update(calls.update, step),
            without_moments(self.compile(calls.measure, "evaluate")),
        )

    def update(self, update: Callable, step: Step) -> Callable:
        """As it is, where the optimizer has one pass of its own; else compiled, and over the state if that is donated."""
        if getattr(step.optimizer, "apply", None) is not None:
            return update
        swapped = self.compile(lambda state, grads: update(grads, state), "the update", in_place=step.own is given)

        def run(grads: Any, state: Any) -> Any:
            new = swapped(state, grads)
            state.params.written_over = step.own is given
            return new

        return run


def without_moments(compiled: Callable) -> Callable:
    """On a state without what only the optimizer looks at: two thirds of a state's leaves, which cost 2 us each to pass."""
    return lambda state, batch: compiled(state._replace(opt_state=None), batch)


def compilations(step: Step) -> list[str]:
    """A line for each compilation of a step so far: what was compiled, in how long, and what had changed.

    >>> from fspeed import optim
    >>> from fspeed.step import step
    >>> compilations(jit(step(lambda p, batch, key: p["w"].sum(), optim.sgd(1.))))
    []
    """
    return list(getattr(step.run, "log", ()))
