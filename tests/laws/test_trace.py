"""Law 8, without a compiler: a whole step traces into one graph that gives the eager step's numbers, bit for bit."""
import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fspeed as fs
from fspeed import optim, random
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map
from fspeed.step import step as make_step
from fspeed.testing import assert_equal, mesh, problem, ranks
from fspeed.testing.stacks import stacked

STACKS = [
    (), ("data_parallel",), ("zero2", "checkpoint"), ("checkpoint", "zero3", "bf16", "accumulate"), ("fp16", "zero1"),
    ("checkpoint save", "zero3 persist"),
]
named = lambda stack: " > ".join(stack) or "bare"


def traced_and_eager(stack, size):
    """The graph's and the eager step's results on the batch that was traced and on another, and the graph's operations."""
    p = problem(depth=1)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.5))
    step = stacked(make_step(p.loss, optimizer, layers=p.layers, trainable=p.trainable), stack, mesh(data=size))
    state = step.init(p.params, random.key(1))
    mine = lambda seed: tree_map(lambda x: x.tensor_split(size)[dist.get_rank()], p.batch(seed, 6))
    leaves, spec = tree_flatten((state, mine(0)))
    graph = make_fx(lambda *xs: tree_leaves(step(*spec.unflatten(xs))))(*leaves)

    results = []
    for seed in (0, 3):
        data = mine(seed)
        results.append((graph(*tree_leaves((state, data))), tree_leaves(step(state, data))))
        state = step(state, data)[0]
    return results, [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("stack", STACKS, ids=named)
def test_the_graph_gives_the_eager_numbers(stack):
    size = 2 if any(n.startswith(("data", "zero")) for n in stack) else 1
    for results, _ in ranks(size)(traced_and_eager, stack, size):
        for got, expected in results:
            assert_equal(got, expected, f"the traced step under {stack}")


def test_collectives_and_recompute_survive_in_the_graph():
    count = lambda ops, name: sum(name in op for op in ops)
    plain = ranks(2)(traced_and_eager, ("zero3",), 2)[0][1]
    again = ranks(2)(traced_and_eager, ("zero3", "checkpoint"), 2)[0][1]
    assert count(plain, "all_gather_into_tensor") > 0 and count(plain, "all_to_all_single") + count(plain, "reduce_scatter") > 0
    assert count(again, "tanh.default") == 2 * count(plain, "tanh.default")


class OneAndHalf(torch.autograd.Function):
    """x, with a derivative that no rule of autograd would give."""

    @staticmethod
    def forward(x):
        return x * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 1.5


@pytest.mark.parametrize("stack", [(), ("checkpoint",), ("accumulate", "checkpoint"), ("bf16",)], ids=named)
def test_a_custom_backward_is_never_lost(stack):
    layer = fs.layer(lambda p, x: OneAndHalf.apply(p["w"] * x))
    step = stacked(make_step(lambda p, batch, key: fs.mean(layer(p["l"], batch)), optim.sgd(1.0), layers="l"), stack, None)
    state, batch = step.init({"l": {"w": torch.tensor(0.0)}}), torch.ones(3)
    leaves, spec = tree_flatten((state, batch))
    graph = make_fx(lambda *xs: tree_leaves(step(*spec.unflatten(xs))[0].params))(*leaves)
    assert graph(*leaves)[0] == tree_leaves(step(state, batch)[0].params)[0] == -1.5
