"""Collectives in a graph: started as soon as they can be, a layer early, and waited for as late as may be."""
from itertools import pairwise

import torch
from torch import fx

c10d = torch.ops._c10d_functional
GATHER, WAIT = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
REDUCE = {c10d.all_to_all_single.default, c10d.reduce_scatter_tensor.default, c10d.all_reduce.default}


def has_collectives(graph: fx.GraphModule) -> bool:
    return any(n.target is WAIT for n in graph.graph.nodes)


def early(graph: fx.GraphModule) -> None:
    """Start each gather behind the wait of the gather before it, so that a layer is gathered while the one before computes.

    It moves with what makes its input, unless that waits for another collective.
    """
    waits = [n for n in graph.graph.nodes if n.target is WAIT and n.args[0].target is GATHER]
    for before, wait in pairwise(waits):
        at = {n: i for i, n in enumerate(graph.graph.nodes)}
        moved = sources(wait.args[0], at[before], at)
        if at[wait.args[0]] > at[before] and not any(n.target is WAIT for n in moved):
            place = before
            for n in moved:
                place.append(n)
                place = n
    graph.recompile()


def sources(node: fx.Node, start: int, at: dict[fx.Node, int]) -> list[fx.Node]:
    """A node and what it needs of all that is done after a place, in order."""
    found, todo = {node}, [node]
    while todo:
        new = {i for i in todo.pop().all_input_nodes if at[i] > start and i not in found}
        found |= new
        todo += new
    return sorted(found, key=at.__getitem__)


def late(graph: fx.GraphModule) -> None:
    """Wait for each reduction, and do what depends on it, where the next one is about to start: backward goes on meanwhile."""
    nodes = list(graph.graph.nodes)
    for start, after in pairwise([*(n for n in nodes if n.target in REDUCE), nodes[-1]]):
        nodes = list(graph.graph.nodes)
        begin, end = nodes.index(start), nodes.index(after)
        block = [n for n in nodes[begin:end] if n.target is WAIT and n.args[0] is start]
        found = set(block)
        for n in nodes[begin:end]:
            if n not in found and not found.isdisjoint(n.all_input_nodes):
                found.add(n)
                block.append(n)
        for n in block:
            after.prepend(n)
    graph.recompile()
