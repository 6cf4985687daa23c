"""What a layer's views make, made again for backward instead of kept: by marks that a trace leaves, and a pass that reads them."""
import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from fspeed.graph.remat import VIEWS
from fspeed.shard.pytree import tree_map

library = torch.library.Library("fspeed", "FRAGMENT")
library.define("again(Tensor x, int use) -> Tensor")       # x, which one use of one layer may have made again; KEPT: which is kept
library.impl("again", lambda x, use: x.clone(), "CompositeExplicitAutograd")
library.impl("again", lambda x, use: x.new_empty_strided(x.shape, x.stride()), "Meta")
AGAIN, KEPT = torch.ops.fspeed.again.default, -1
uses = itertools.count()


class _Mark(torch.autograd.Function):
    """The identity, with a node in a trace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: int) -> Tensor:
        return AGAIN(x, use)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def marked(usable: Any) -> Any:
    """What views made for one use of one layer, so marked in a trace."""
    use = next(uses)
    return tree_map(lambda x: _Mark.apply(x, use), usable)


def kept(usable: Any) -> Any:
    """What is not made again, so marked in a trace."""
    return tree_map(lambda x: _Mark.apply(x, KEPT), usable)


def regather(graph: fx.GraphModule) -> None:
    """Make what is marked again, where other layers were used since its last use; and take the marks away.

    >>> from fspeed.graph.trace import traced
    >>> def fn(a, b):
    ...     a, b = marked(a * 2), marked(b * 2)
    ...     return (a.sin() + b.sin()) * a.cos()        # b is used between both uses of a, so a is multiplied twice
    >>> graph, *_ = traced(fn, (torch.ones(2), torch.ones(2)))
    >>> regather(graph)
    >>> [n.target.overloadpacket.__name__ for n in graph.graph.nodes if n.op == "call_function"]
    ['mul', 'mul', 'sin', 'sin', 'add', 'mul', 'cos', 'mul']
    """
    nodes = list(graph.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    marks: dict[int, list[fx.Node]] = defaultdict(list)
    for n in nodes:
        if n.target is AGAIN:
            marks[n.args[1]].append(n)
    again = {use: made(group, at) for use, group in marks.items() if use != KEPT}
    users = {use: sorted({u for n in whole for u in n.users} - whole, key=at.__getitem__) for use, whole in again.items()}
    begins = {use: at[found[0]] for use, found in users.items() if found}
    for use in begins:
        others = [i for other, i in begins.items() if other != use]
        for run in runs(users[use], at, others)[1:]:
            copy(graph, again[use], run, at)
    for n in graph.graph.nodes:
        if n.target is AGAIN:
            n.replace_all_uses_with(n.args[0])
            graph.graph.erase_node(n)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def made(marks: list[fx.Node], at: dict[fx.Node, int]) -> set[fx.Node]:
    """All that is done to make what is marked, and the views of it."""
    found, todo = set(marks), list(marks)
    while todo:
        new = {i for i in todo.pop().all_input_nodes if i.op == "call_function" and i not in found and tuple(i.args[1:]) != (KEPT,)}
        found |= new
        todo += new
    views, todo = set(), list(marks)
    while todo:
        new = {u for u in todo.pop().users if is_view(u) and u not in views}
        views |= new
        todo += new
    return found | views


def is_view(n: fx.Node) -> bool:
    return n.target in VIEWS or getattr(n.target, "__name__", "") == "getitem"


def runs(users: list[fx.Node], at: dict[fx.Node, int], others: list[int]) -> list[list[fx.Node]]:
    """Users in order, cut where another layer's use begins between two of them."""
    out: list[list[fx.Node]] = [[users[0]]]
    for last, n in itertools.pairwise(users):
        if any(at[last] < i < at[n] for i in others):
            out.append([])
        out[-1].append(n)
    return out


def copy(graph: fx.GraphModule, whole: set[fx.Node], run: list[fx.Node], at: dict[fx.Node, int]) -> None:
    """Give these users a copy of their own of all that is made."""
    copies: dict[fx.Node, fx.Node] = {}
    with graph.graph.inserting_before(run[0]):
        for n in sorted(whole, key=at.__getitem__):
            copies[n] = graph.graph.node_copy(n, lambda x: copies.get(x, x))
    for user in run:
        for n in whole.intersection(user.all_input_nodes):
            user.replace_input_with(n, copies[n])
