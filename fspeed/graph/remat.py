"""What a backward pass computes again because that is free: chosen by a min-cut, done within one graph."""
import copy

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

aten = torch.ops.aten
VIEWS = {
    *(getattr(aten, name).default for name in ("view", "permute", "t", "alias", "detach", "expand", "unsqueeze", "squeeze")),
    aten._unsafe_view.default, aten.transpose.int, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.full.default,
    aten.scalar_tensor.default,
}


def rematerialize(graph: fx.GraphModule, seed: fx.Node) -> None:
    """Let what depends on seed, the backward pass, compute again what costs nothing but arithmetic, instead of keeping it.

    What is computed again is what torch.compile's partitioner would: the least that is kept between both passes. What crosses
    over is a buffer of its own, as it would be between two graphs.

    Args:
        graph: forward and backward in one, with the seed of backward among its inputs.
        seed: that input.

    Source: the min-cut of functorch's partitioners.
    """
    nodes = list(graph.graph.nodes)
    later = {seed}
    for n in nodes:
        if not later.isdisjoint(n.all_input_nodes):
            later.add(n)
    again = chosen(graph, seed, later) - later
    clones: dict[fx.Node, fx.Node] = {}

    def clone(n: fx.Node, before: fx.Node) -> fx.Node:
        if n not in clones:
            args = {i: clone(i, before) if i in again else i for i in n.all_input_nodes}
            with graph.graph.inserting_before(before):
                clones[n] = graph.graph.node_copy(n, lambda x: args[x])
        return clones[n]

    for n in nodes:
        if n in later and n.op == "call_function":
            for i in n.all_input_nodes:
                if i in again:
                    n.replace_input_with(i, clone(i, n))
    behind = later | set(clones.values())
    for n in nodes:
        own = n.op == "call_function" and n.target not in VIEWS and isinstance(n.meta.get("val"), Tensor)
        if own and n not in behind and not behind.isdisjoint(n.users):
            n.meta = {**n.meta, "inductor_realize_to_strides": True}
    graph.graph.eliminate_dead_code()


def chosen(graph: fx.GraphModule, seed: fx.Node, later: set[fx.Node]) -> set[fx.Node]:
    """What the partitioner puts into both passes."""
    nodes = list(graph.graph.nodes)
    for i, n in enumerate(nodes):
        n.meta["place"] = i
    trial = copy.deepcopy(graph)
    twin = dict(zip(nodes, trial.graph.nodes, strict=True))
    outs = list(dict.fromkeys(n for n in nodes[-1].args[0] if isinstance(n, fx.Node) and n.op == "call_function"))
    forward = [n for n in outs if n not in later]
    twin[nodes[-1]].args = ([twin[n] for n in (*forward, *(n for n in outs if n in later))],)
    twin[seed].name = twin[seed].target = "tangents_1"      # how the partitioner knows where backward begins
    trial.recompile()
    _, backward = min_cut_rematerialization_partition(trial, None, num_fwd_outputs=len(forward))
    return {nodes[n.meta["place"]] for n in backward.graph.nodes if n.op == "call_function" and "place" in n.meta}
