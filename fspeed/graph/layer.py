"""Layers, compiled one by one: forward and backward of each kind of layer, once, for all layers of its shapes."""
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing

from fspeed.grad import in_torch_func, in_trace
from fspeed.graph.compiled import Backend, eager, told
from fspeed.graph.trace import fake_mode
from fspeed.opened import Opening
from fspeed.shard.pytree import tree_flatten, tree_unflatten


def compiled_layer(backend: Backend, log: list[str], limit: int) -> Callable:
    """A wrapper round every layer: what is inside all views is compiled, for each function, structure and shapes once.

    Args:
        backend: from a graph and fake inputs to a function of a list of tensors.
        log: gets a line for each compilation, of forward and of backward.
        limit: how many shapes of one layer function may be compiled.
    """
    cache: dict = {}

    def wrap(fn: Any, at: Any) -> Callable:
        if not isinstance(fn, Opening):
            return fn
        return Opening(lambda *args, **kwargs: run(fn.fn, args, kwargs), fn.names, fn.see)

    def run(fn: Callable, args: tuple, kwargs: dict) -> Any:
        if in_torch_func() or in_trace():
            return fn(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        others = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, Tensor))
        grads = tuple(x.requires_grad for x in tensors) if torch.is_grad_enabled() else None
        key = spec, others, tuple((x.shape, x.dtype, x.stride(), x.device) for x in tensors), grads
        found = cache.setdefault(fn, {})
        if key not in found:
            name = f"layer {getattr(fn, '__name__', fn)}"
            if len(found) == limit:
                raise RuntimeError(
                    f"jit: {name} was compiled {limit} times, for other shapes each time; "
                    "pad batches to a few shapes, or raise limit="
                )
            found[key] = made(fn, name, spec, len(leaves), others, backend, log)
        return found[key](*tensors)

    return wrap


def made(fn: Callable, name: str, spec: Any, count: int, others: tuple, backend: Backend, log: list[str]) -> Callable:
    """A layer, compiled at its first call: a function of the tensors among its leaves; the others are as they were."""
    from torch._inductor.decomposition import select_decomp_table  # seconds to import

    box: dict = {}
    fixed = dict(others)

    def flat(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        args, kwargs = tree_unflatten(spec, [fixed[i] if i in fixed else next(rest) for i in range(count)])
        outs, box["spec"] = tree_flatten(fn(*args, **kwargs))
        return outs

    def compiler(part: str, graph: fx.GraphModule, inputs: list) -> Callable:
        what = f"{name}, {part}: {len(graph.graph.nodes):,} operations"
        with told(what, "", log, time.monotonic(), quiet=backend is eager):
            return boxed(backend(graph, inputs))

    call = aot_function(
        flat, partial(compiler, "forward"), partial(compiler, "backward"), min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )

    def run(*tensors: Tensor) -> Any:
        if box:
            return tree_unflatten(box["spec"], call(*tensors))
        with tracing(TracingContext(fake_mode())):
            outs = call(*tensors)
        return tree_unflatten(box["spec"], outs)

    return run


def boxed(run: Callable) -> Callable:
    """A function of a list, as AOT wants to call it."""
    def call(xs: list) -> Any:
        return run(xs)

    call._boxed_call = True     # type: ignore[attr-defined]
    return call
