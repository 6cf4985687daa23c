"""Functions on trees, compiled: traced once for each structure and shapes, then one call of what the compiler made."""
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor

from fspeed.grad import in_trace, watched
from fspeed.graph.counters import once
from fspeed.graph.early import early, has_collectives, late
from fspeed.graph.regather import regather
from fspeed.graph.remat import rematerialize
from fspeed.graph.trace import traced
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_paths, tree_unflatten

library = torch.library.Library("fspeed", "FRAGMENT")
library.define("after(Tensor x, Tensor y) -> Tensor")      # x, once y is there: between passes that a compiler must not mix
library.impl("after", lambda x, y: x.clone(), "CompositeExplicitAutograd")
library.impl("after", lambda x, y: torch.empty_like(x), "Meta")

Backend = Callable[[fx.GraphModule, list], Callable[[list], Any]]


def inductor(graph: fx.GraphModule, inputs: list) -> Callable[[list], Any]:
    """torch's compiler."""
    from torch._inductor import config  # seconds to import
    from torch._inductor.compile_fx import compile_fx_inner

    with config.patch(reorder_for_peak_memory=config.reorder_for_peak_memory and not has_collectives(graph)):
        # that order would have each collective waited for where it starts
        return compile_fx_inner(graph, inputs, cpp_wrapper=config.cpp_wrapper)


def eager(graph: fx.GraphModule, inputs: list) -> Callable[[list], Any]:
    """No compiler: the graph, operation by operation."""
    return lambda xs: graph(*xs)


BACKENDS: dict[str, Backend] = {"inductor": inductor, "eager": eager}


def compiled(
    fn: Callable, name: str, backend: Backend, log: list[str], limit: int, seeded: bool = False, in_place: bool = False
) -> Callable:
    """fn, compiled for each structure and shapes of its arguments.

    Args:
        fn: a pure function of trees of tensors; given `seed=` too, a 0-d tensor that its backward pass starts from, if seeded.
        name: what to call it in messages.
        backend: from a graph and fake inputs to a function of a list of tensors.
        log: gets a line for each compilation.
        limit: how many compilations there may be.
        in_place: write the result over the first argument, whose structure its first part has.

    Raises:
        RuntimeError: at the compilation after the limit.
    """
    cache: dict = {}

    def call(*args):
        if in_trace() or watched(*args):
            return fn(*args)
        leaves, spec = tree_flatten(args)
        key = spec, tuple((x.shape, x.dtype, x.stride(), x.device) for x in leaves)
        found = cache.get(key)
        if found is None:
            if len(cache) == limit:
                raise RuntimeError(
                    f"jit: {name} was compiled {limit} times, and now come others: {changed(cache, key, args)}; pad batches to a "
                    "few shapes, or raise limit="
                )
            why = f"; {changed(cache, key, args)}" if cache else ""
            found = cache[key] = made(fn, name, args, backend, log, why, seeded, in_place)
        run, out = found
        with torch.no_grad():
            return out(run([*leaves]), leaves)      # what runs may empty its list

    return call


def made(fn, name, args, backend, log, why, seeded, in_place):
    """The compiled function of a list of leaves, and how the result is made of what it returns."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    begun = time.monotonic()
    if seeded:
        graph, inputs, spec = traced(lambda seed, args: fn(*args, seed=seed), (torch.ones(()), args))
    else:
        graph, inputs, spec = traced(fn, args)
    plain, operations = backend is eager, len(graph.graph.nodes)
    with told(f"{name}: {operations:,} operations", why, log, begun, quiet=plain):
        if not plain:
            once(graph)
            _recursive_joint_graph_passes(graph)
        if seeded:
            inputs = without_seed(graph, inputs, again=not plain)
        for improve in (regather, early, late):
            improve(graph)
        count = len(tree_leaves(args[0])) if in_place else 0
        write_over(graph, count)
        output = next(n for n in graph.graph.nodes if n.op == "output")
        output.args = (tuple(output.args[0]),)
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        graph.recompile()
        mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
        with torch.no_grad(), tracing(TracingContext(mode)):
            run = backend(graph, inputs)
    return run, lambda outs, leaves: tree_unflatten(spec, [*leaves[:count], *outs])


@contextmanager
def told(what: str, why: str, log: list[str], begun: float, quiet: bool = False) -> Iterator[None]:
    """Say on stderr what is being compiled and how long it took, and note it in the log."""
    if not quiet:
        print(f"jit: compiling {what}{why} ...", end="", file=sys.stderr, flush=True)
    yield
    seconds = f"{time.monotonic() - begun:.1f} s"
    log.append(f"{what}, {seconds}{why}")
    if not quiet:
        print(f" {seconds}", file=sys.stderr, flush=True)


def without_seed(graph: fx.GraphModule, inputs: list, again: bool) -> list:
    """The graph with 1 for the seed of its backward pass, in which what is free is computed again."""
    seed = next(iter(graph.graph.nodes))
    if seed.users and again:
        rematerialize(graph, seed)
    with graph.graph.inserting_before(next(n for n in graph.graph.nodes if n.op != "placeholder")):
        one = graph.graph.call_function(
            torch.ops.aten.full.default, ([], 1.0), {"dtype": torch.float32, "device": inputs[0].device, "pin_memory": False}
        )
    one.meta["val"] = seed.meta["val"]
    seed.replace_all_uses_with(one)
    graph.graph.erase_node(seed)
    return inputs[1:]


def write_over(graph: fx.GraphModule, count: int) -> None:
    """Copy the first `count` results of a graph into its first inputs, and return the others."""
    nodes = list(graph.graph.nodes)
    old = [n for n in nodes if n.op == "placeholder"][:count]
    new, rest = nodes[-1].args[0][:count], nodes[-1].args[0][count:]
    with graph.graph.inserting_before(nodes[-1]):
        for o, n in zip(old, new, strict=True):
            if o is not n:
                copied = graph.graph.call_function(torch.ops.aten.copy_.default, (o, n))
                copied.meta["val"] = o.meta["val"]
    nodes[-1].args = (rest,)


def changed(cache: dict, key: tuple, args: tuple) -> str:
    """What differs from the arguments of the last compilation, by path."""
    spec, shapes = list(cache)[-1]
    if spec != key[0]:
        return "the structure changed"
    paths = tree_paths(args)
    found = [
        f"{path} {tuple(old[0])} {old[1]} -> {tuple(new[0])} {new[1]}"
        for path, old, new in zip(paths, shapes, key[1], strict=True) if old != new
    ]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
