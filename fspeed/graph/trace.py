"""A function on trees as one graph of aten operations, by running it on fake tensors; never by reading its code."""
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from fspeed.shard.pytree import tree_flatten, tree_unflatten

BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
SAYS = ("data-dependent", ".numpy() is not supported", "Cannot access data pointer", "'meta' tensors")
HERE = __file__.rpartition("/fspeed/")[0] + "/fspeed/"


def traced(fn: Callable, args: tuple) -> tuple[fx.GraphModule, list[FakeTensor], Any]:
    """fn on the shapes of args as a graph, without values.

    Args:
        fn: a pure function of trees of tensors to a tree of tensors.
        args: its arguments; only shapes, dtypes, strides and devices are looked at.

    Returns:
        The graph, from the leaves of args to those of the result; its inputs as fake tensors; the result's structure.

    Raises:
        TypeError: the function's Python depends on a tensor's values; the message has the user's line.

    >>> graph, inputs, _ = traced(lambda x: {"y": x + 1}, (torch.ones(2),))
    >>> [n.op for n in graph.graph.nodes], graph(torch.ones(2))
    (['placeholder', 'call_function', 'output'], [tensor([2., 2.])])
    """
    from torch._inductor.decomposition import select_decomp_table  # seconds to import

    leaves, spec = tree_flatten(args)
    box = {}

    def flat(*xs):
        outs, box["spec"] = tree_flatten(fn(*tree_unflatten(spec, xs)))
        return outs

    mode = fake_mode()
    fakes = [mode.from_tensor(x, static_shapes=True) for x in leaves]
    with torch.no_grad(), by_line(fn):
        graph = make_fx(flat, select_decomp_table())(*fakes)
        if any(mutates(n) for n in graph.graph.nodes):
            graph = make_fx(functionalize(graph), select_decomp_table())(*fakes)
    graph.graph.eliminate_dead_code()
    return graph, fakes, box["spec"]


def fake_mode() -> FakeTensorMode:
    """Tensors without values; the empty environment of shapes is what Inductor's cache on disk asks for."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class by_line:
    """Turn what a trace raises where Python looks at a value into an error with the line that looked."""

    def __init__(self, fn: Callable):
        self.fn = fn

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is None or not looks_at_values(error):
            return
        raise TypeError(
            f"jit: {users_line(tb)} looks at the value of a tensor, which a compiled step does not have while it is made; use "
            "torch.where, or pass what decides as a Python number to a function that makes the step"
        ) from error


def looks_at_values(error: BaseException) -> bool:
    return isinstance(error, BY_VALUE) or any(says in str(error) for says in SAYS)


def users_line(tb: Any) -> str:
    """The last line of a traceback that is neither torch's nor fspeed's own."""
    torch_at = torch.__file__.rpartition("/")[0]
    frames = [f for f in traceback.extract_tb(tb) if not f.filename.startswith((torch_at, HERE, "<"))]
    if not frames:
        return "the step"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: `{last.line}`"
