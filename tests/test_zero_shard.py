"""ZeRO: weights are really gone between a layer's forward and its backward, and come back, whatever is done to them."""
import functools
import time

import pytest
import torch
import torch.distributed as dist

import fspeed as fs
from fspeed import optim, random
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import assert_close, mesh, ranks
from fspeed.testing.pool import Pool, RankError
from fspeed.testing.stacks import stacked

T = torch.tensor
STACKS = [
    ("zero1",), ("zero2",), ("zero3",), ("zero3 persist",), ("zero3", "checkpoint"), ("checkpoint", "accumulate", "zero3"),
]
named = lambda stack: " > ".join(stack)
scale = fs.layer(lambda p, x: torch.tanh(x * p["w"]))
product = fs.layer(lambda p, x: torch.tanh(x @ p["w"]))


def drawn(*shape, dtype=torch.float32):
    seed = sum(shape) + len(shape)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layers(n, *shape, dtype=torch.float32):
    return [{"w": drawn(*shape, dtype=dtype) * (1 + i)} for i in range(n)]


def parallel(p, x, key):
    a, b = scale(p["l"][0], x), scale(p["l"][1], x)
    c = scale(p["l"][0], b)
    return fs.mean((scale(p["l"][2], a) * scale(p["l"][1], c) + a * b) ** 2)


transposed = fs.layer(lambda p, x: torch.tanh(x @ p["w"].t())[:, :2] @ p["w"][1:, :2].t().flip(0).mT)
aliased = fs.layer(lambda p, x: (p["w"], p["w"][0]))
negative = fs.layer(lambda p, x: torch.tanh(x * p["w"].conj().imag) * p["w"].conj().imag)
conjugate = fs.layer(lambda p, x: torch.tanh((x.to(p["w"].dtype) @ p["w"].mH).real))
bits_as_complex = fs.layer(lambda p, x: torch.tanh(torch.view_as_complex(p["w"]).abs() * x.sum(-1)))
adjacency = torch.eye(3).to_sparse()
sparse = fs.layer(lambda p, x: torch.sparse.mm(adjacency, torch.tanh(x @ p["w"]).t()).t())
several = fs.layer(lambda ps, x: torch.tanh(x * ps[0]["w"]) + ps[1]["w"] * x)


def through_an_alias(p, x, key):
    w, first = aliased(p["l"][0], x)
    return fs.mean((x * w * w).sum(-1) * first)


# (loss, params, layers, trainable)
PROBLEMS = {
    "a layer used twice": (lambda p, x, key: fs.mean(product(p["l"][0], product(p["l"][0], x))), {"l": layers(1, 3, 3)}, "l/*"),
    "parallel branches": (parallel, {"l": layers(3, 3)}, "l/*"),
    "an output that is the weight": (through_an_alias, {"l": layers(1, 3)}, "l/*"),
    "only views of weights": (lambda p, x, key: fs.mean(transposed(p["l"][0], x)), {"l": layers(1, 3, 3)}, "l/*"),
    "negative views": (lambda p, x, key: fs.mean(negative(p["l"][0], x)), {"l": layers(1, 3, dtype=torch.complex64)}, "l/*"),
    "conjugate views": (lambda p, x, key: fs.mean(conjugate(p["l"][0], x)), {"l": layers(1, 3, 3, dtype=torch.complex64)}, "l/*"),
    "views of another dtype": (lambda p, x, key: fs.mean(bits_as_complex(p["l"][0], x)), {"l": layers(1, 2)}, "l/*"),
    "sparse constants": (lambda p, x, key: fs.mean(sparse(p["l"][0], x)), {"l": layers(1, 3, 3)}, "l/*"),
    "a layer of two groups": (lambda p, x, key: fs.mean(several((p["l"][0], p["l"][1]), x)), {"l": layers(2, 3)}, "l/*"),
    "a layer that is frozen": (
        lambda p, x, key: fs.mean(scale(p["l"][1], scale(p["l"][0], x)) * p["r"]), {"l": layers(2, 3), "r": T(2.0)}, "l/*",
        ["l/0/w", "r"],
    ),
    "a layer that is not used": (lambda p, x, key: fs.mean(scale(p["l"][1], x)), {"l": layers(2, 3), "r": drawn(2)}, "l/*"),
    "a layer in a layer": (
        lambda p, x, key: fs.mean(fs.layer(lambda q, x: x + scale(q["in"], x))(p["l"], x)), {"l": {"in": layers(1, 3)[0]}}, "l"
    ),
}


def trained(problem, stack, rows):
    loss, params, which, *trainable = PROBLEMS[problem]
    step = fs.step(loss, optim.sgd(0.3), layers=which, trainable=trainable[0] if trainable else "**")
    step = stacked(step, stack, mesh(data=len(rows)))
    state = step.init(params, random.key(1))
    metrics = []
    for i in range(2):
        batch = (drawn(sum(rows), 3) + i).split(list(rows))[dist.get_rank()]
        state, m = step(state, batch)
        metrics.append(m)
    return step.params(state), metrics


@pytest.mark.parametrize("problem", PROBLEMS)
def test_whatever_is_done_to_weights(problem):
    """Under every stage, with checkpoint and accumulation; a layer used twice is case 7."""
    expected = ranks(1)(trained, problem, (), (3,))[0]
    for stack in STACKS:
        for got in ranks(2)(trained, problem, stack, (2, 1)):
            assert_close(got, expected, 2e-5, f"{problem} under {named(stack)}")


# ---------------------------------------------------------------- what is alive
def weights_alive(stack, depth=4, width=16):
    """Between the forward and the backward of a loss: how many layers' gathered weights are there."""
    from torch.multiprocessing.reductions import StorageWeakRef

    refs, alive = [], []
    noted = fs.layer(lambda p, x: refs.append(StorageWeakRef(p["w"].untyped_storage())) or torch.tanh(x @ p["w"]))

    def look():         # gloo's thread lets go of a buffer a moment after its wait
        time.sleep(0.002)
        return sum(not ref.expired() for ref in refs[:depth])

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            alive.append(min(look() for _ in range(20)))
            return g

    def loss(p, x, key):
        for layer in p["l"]:
            x = noted(layer, x)
        return fs.mean(Looks.apply(x))

    step = stacked(fs.step(loss, optim.sgd(0.1), layers="l/*"), stack, mesh(data=2))
    state = step.init({"l": [{"w": torch.ones(width, width) / width} for _ in range(depth)]})
    step(state, torch.ones(1, width))
    return alive


@pytest.mark.parametrize("stack, expected", [
    (("zero1",), 4), (("zero2",), 4), (("zero3",), 1), (("zero3", "checkpoint"), 0), (("checkpoint", "zero3"), 0),
    (("bf16", "zero3"), 1), (("zero3", "bf16"), 1),
])
def test_layers_weights_are_gone_between_forward_and_backward_but_the_last_ones(stack, expected):
    for alive in ranks(2)(weights_alive, stack):
        assert alive == [expected]


def test_groups_that_persist_stay():
    def run(persist):
        from fspeed.testing.count import Counted

        loss = lambda p, x, key: fs.mean(functools.reduce(lambda x, q: product(q, x), p["l"], x))
        step = fs.zero_shard(fs.step(loss, optim.sgd(0.1), layers="l/*"), mesh(data=2), stage=3, persist=persist)
        state = step.init({"l": [{"w": torch.eye(16)} for _ in range(3)]})
        with Counted(2) as counted:
            step(state, torch.ones(1, 16))
        return counted.calls["all_gather_into_tensor"]

    # the first layer's weights are not needed again, as the batch has no gradient; the last one's are still there
    assert ranks(2)(run, 255) == [4, 4] and ranks(2)(run, 256) == [3, 3]


@pytest.mark.parametrize("stage", [0, 4, "3"])
def test_no_such_stage(stage):
    with pytest.raises(ValueError, match="stage must be 1, 2 or 3"):
        fs.zero_shard(fs.step(lambda p, x, key: fs.mean(x), optim.sgd(0.1)), fs.mesh(data=1), stage=stage)


def test_every_stage_stores_alike():
    """So a state goes from one stage to another."""
    def run():
        states = []
        for stage in (1, 2, 3):
            step = fs.zero_shard(fs.step(lambda p, x, key: fs.mean(product(p["l"][0], x)), optim.adam(0.1), layers="l/*"),
                                 mesh(data=2), stage=stage)
            state = states[-1] if states else step.init({"l": [{"w": torch.eye(3)}]})
            states.append(step(state, torch.ones(1, 3))[0])
        same = lambda a, b: tree_map(lambda x, y: x.shape == y.shape, a, b)
        return all(all(tree_leaves(same(states[0].params, s.params))) for s in states), int(states[-1].step)

    assert ranks(2)(run) == [(True, 3)] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_that_one_rank_leaves_out(stage):
    def run():
        block = fs.layer(lambda p, x: x + torch.tanh(x @ p["w"]))

        def loss(params, batch, key):
            for i, p in enumerate(params["blocks"]):
                batch = batch if i == dist.get_rank() == 1 else block(p, batch)
            return fs.mean(batch**2)

        step = fs.zero_shard(fs.step(loss, fs.optim.sgd(0.1), layers="blocks/*"), fs.mesh(data=-1), stage=stage)
        state = step.init({"blocks": [{"w": torch.eye(8)} for _ in range(3)]})
        step(step(state, torch.ones(4, 8))[0], torch.ones(4, 8))

    with Pool(2, timeout=2) as pool, pytest.raises(RankError, match=r"CollectiveError: .* over axis 'data' failed on its rank"):
        pool(run, timeout=30)
