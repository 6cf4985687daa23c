"""What depends only on counters (steps, rates, powers of b1 and b2) is computed once, not once an element."""
import torch
from torch import Tensor, fx

COPY = torch.ops.aten.copy_.default


def once(graph: fx.GraphModule) -> None:
    """Merge equal 0-d computations, and give those that depend on 0-d inputs alone a buffer of their own.

    >>> from fspeed.graph.trace import traced
    >>> graph, *_ = traced(lambda t, x, y: (x * 0.9 ** t, y * 0.9 ** t), (torch.tensor(3.), torch.ones(2), torch.ones(2)))
    >>> once(graph)
    >>> sum("pow" in str(n.target) for n in graph.graph.nodes)
    1
    """
    counters: set[fx.Node] = set()
    seen: dict = {}
    for n in list(graph.graph.nodes):
        value = n.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() or n.target is COPY:
            continue
        if n.op == "placeholder" or (n.all_input_nodes and counters.issuperset(n.all_input_nodes)):
            counters.add(n)
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
            first = seen.setdefault((n.target, repr(n.args), repr(n.kwargs)), n)
            if first is not n:
                n.replace_all_uses_with(first)
                graph.graph.erase_node(n)
                counters.discard(n)
    for n in counters:
        if n.op == "call_function" and any(u not in counters for u in n.users):
            n.meta = {**n.meta, "inductor_realize_to_strides": True}
