"""ZeRO hides what it sends: collectives start before their results are needed, on every path that a loss may take."""
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fspeed as fs
from fspeed import optim
from fspeed.shard import piece
from fspeed.testing import assert_close, mesh, ranks
from fspeed.testing.stacks import stacked


class Mark(torch.autograd.Function):
    """x; in backward it notes that its turn has come."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.note()
        return g, None


def noted(events):
    """Collectives of `shard.piece` that note their start and their end, and the elements of a rank's shard: its group's name."""
    def noting(what, start, size):
        def run(x, axis):
            name = f"{what} {size(x, axis) // 16}"
            events.append(f"{name}..")
            pending = start(x, axis)
            return replace(pending, finish=lambda: (events.append(f"..{name}"), pending.finish())[1])

        return run

    return mock.patch.multiple(
        piece, start_all_gather=noting("gather", piece.start_all_gather, lambda x, axis: len(x)),
        start_reduce_scatter=noting("reduce", piece.start_reduce_scatter, lambda x, axis: len(x) // axis.size),
    )


def order_of_events(stack, evaluate=False):
    """Of the second step with a root and layers whose shards have 1, 2 and 3 rows."""
    events = []

    @fs.layer
    def block(p, x):
        i = p["w"].numel() // 32
        events.append(f"forward {i}")
        return Mark.apply(torch.tanh(x * (p["w"] ** 2).sum()), lambda: events.append(f"backward {i}"))

    def loss(p, x, key):
        for q in p["l"]:
            x = block(q, x * p["root"].sum())
        return fs.mean(x)

    step = stacked(fs.step(loss, optim.sgd(0.1), layers="l/*"), stack, mesh(data=2))
    params = {"l": [{"w": torch.full((32 * i,), 0.01)} for i in (1, 2, 3)], "root": torch.full((32 * 9,), 0.01)}
    state, x = step.init(params), torch.ones(2, 1)
    state, _ = step(state, x)
    step.evaluate(state, x)
    events.clear()
    with noted(events):
        step.evaluate(state, x) if evaluate else step(state, x)
    return events


FORWARD = """gather 9.. gather 1.. ..gather 9
    ..gather 1 gather 2.. forward 1   ..gather 2 gather 3.. forward 2"""
BACKWARD = """backward 3 reduce 3..
    backward 2 ..gather 2 gather 1.. reduce 2.. ..reduce 3
    backward 1 ..gather 1 reduce 1.. ..reduce 2   reduce 9.. ..reduce 1 ..reduce 9"""
REDUCED = """backward 3 reduce 3..   backward 2 reduce 2.. ..reduce 3   backward 1 reduce 1.. ..reduce 2
    reduce 9.. ..reduce 1 ..reduce 9"""


@pytest.mark.parametrize("stack, expected", [
    (("zero3",), f"{FORWARD} ..gather 3 gather 2.. forward 3 {BACKWARD}"),
    (("zero2",), f"""gather 9.. gather 1.. gather 2.. gather 3.. ..gather 9
        ..gather 1 forward 1 ..gather 2 forward 2 ..gather 3 forward 3 {REDUCED}"""),
])
def test_the_next_layer_is_gathered_and_the_last_one_reduced_while_a_layer_computes(stack, expected):
    for events in ranks(2)(order_of_events, stack):
        assert events == paired(expected)


def test_evaluation_gathers_ahead_too():
    for events in ranks(2)(order_of_events, ("zero3",), True):
        assert events == paired(f"{FORWARD} ..gather 3 forward 3")


def paired(text):
    """Events of two words each."""
    words = text.split()
    return [f"{a} {b}" for a, b in zip(words[::2], words[1::2], strict=True)]


# ---------------------------------------------------------------- paths that are not the last one's
product = fs.layer(lambda p, x: torch.tanh(x @ p["w"]))


def by_the_batch(p, batch, key):
    """The batch says which layers are used, and in what order."""
    x, which = batch
    for i in which[0].tolist():
        x = product(p["l"][i], x)
    return fs.mean(x**2 * p["root"].sum())


def in_two_ways(p, batch, key):
    """One use of a layer within vmap, one outside: its gradient comes both with autograd and past it."""
    x, _ = batch
    mapped = torch.func.vmap(lambda row: product(p["l"][0], row))(x)
    return fs.mean(product(p["l"][0], product(p["l"][1], mapped)) ** 2)


PATHS = [(0, 1, 2), (0, 1, 2), (0, 2), (2, 1, 0), (1,), (0, 0, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2)]
STACKS = [
    ("zero3",), ("zero2",), ("zero3 persist",), ("checkpoint", "zero3"), ("zero3", "accumulate"), ("zero3", "checkpoint some"),
    ("checkpoint save", "zero3"),
]


def trained(stack, loss, size, paths):
    step = stacked(fs.step(loss, optim.sgd(0.3), layers="l/*"), stack, mesh(data=size))
    draw = lambda seed, *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    state = step.init({"l": [{"w": draw(i, 4, 4)} for i in range(3)], "root": torch.ones(2)})
    seen = []
    for i, path in enumerate(paths):
        batch = draw(9 + i, 6, 4), torch.tensor(path).expand(6, -1)
        mine = tuple(x.tensor_split(size)[dist.get_rank()] for x in batch)
        state, metrics = step(state, mine)
        seen.append((metrics, step.evaluate(state, mine)))
    return seen, step.params(state)


@pytest.mark.parametrize("stack", STACKS, ids=" > ".join)
@pytest.mark.parametrize("loss", [by_the_batch, in_two_ways])
def test_any_path_gives_the_same_answer(stack, loss):
    expected = ranks(1)(trained, (), loss, 1, PATHS)[0]
    for got in ranks(2)(trained, stack, loss, 2, PATHS):
        assert_close(got, expected, 2e-5, f"{loss.__name__} under {' > '.join(stack)}")


def sent(path):
    """How many gathers and reductions the first and the third of equal steps start."""
    counts = []
    step = stacked(fs.step(by_the_batch, optim.sgd(0.3), layers="l/*"), ("zero3",), mesh(data=2))
    state = step.init({"l": [{"w": torch.eye(4)} for i in range(3)], "root": torch.ones(2)})
    for _ in range(3):
        events = []
        with noted(events):
            state, _ = step(state, (torch.ones(2, 4), torch.tensor(path).expand(2, -1)))
        counts.append(sum(e.endswith("..") for e in events))
    return counts


@pytest.mark.parametrize("path", [(0, 1, 2), (0, 0, 1), (0, 1, 0, 1), (2,)])
def test_nothing_is_gathered_for_nothing_on_a_path_that_is_taken_again(path):
    for first, _, third in ranks(2)(sent, path):
        assert first == third


def test_other_values_than_the_stored_ones_are_gathered_anew():
    """A transform that stands inside and changes parameters: what was started of the stored ones is not used."""
    def nudged(inner):
        def run(loss, state, batch):
            return inner(loss, state._replace(params=fs.shard.pytree.tree_map(lambda x: x + 1, state.params)), batch)

        return run

    def run(stack, size):
        from fspeed.step import inside

        loss = lambda p, x, key: fs.mean(product(p["l"][1], product(p["l"][0], x)))
        step = inside(stacked(fs.step(loss, optim.sgd(0.1), layers="l/*"), stack, mesh(data=size)), nudged)
        state = step.init({"l": [{"w": torch.eye(16) * i} for i in range(2)]})
        for _ in range(3):
            state, _ = step(state, torch.ones(2, 16)[: 2 // size])
        return step.params(state)

    assert_close(ranks(2)(run, ("zero3",), 2)[0], ranks(1)(run, (), 1)[0], 2e-5, "nudged")
