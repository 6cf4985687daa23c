"""Expert parallelism: without a capacity, the bare step's answer in any stack and on any split; with one, what it drops."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fspeed as fs
from fspeed import optim
from fspeed.shard.experts import mixture_of_experts
from fspeed.shard.mesh import Axis
from fspeed.testing import Problem, assert_close, mesh, ranks
from fspeed.testing.check import followed
from fspeed.testing.count import Counted
from fspeed.testing.stacks import stacked
from fspeed.transforms.expert_shard import expert_shard

EXPERTS, WIDTH, ROWS = 4, 3, 8
ONE = Axis("expert", 0, 0, 1, None)
pair = lambda params, x: torch.tanh(torch.bmm(x, params["a"])) @ params["b"]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rows_of(seed, rows):
    return drawn(rows, WIDTH, seed=seed), drawn(rows, 1)


def model(m, k, auxiliary=0.1):
    axis = m.axis("expert")

    @fs.layer
    def block(p, x):
        return mixture_of_experts(x, p["router"], pair, p["experts"], axis, k=k, over=m.axes)

    def loss(params, batch, key):
        x, y = batch
        extra = 0.0
        for p in params["blocks"]:
            mixed = block(p, x)
            x, extra = x + mixed.out, extra + auxiliary * (mixed.balance + 0.01 * mixed.z)
        found = fs.mean((x @ params["out"] - y) ** 2)
        return fs.Loss(found.total + extra * found.weight, found.weight)

    blocks = [{
        "router": drawn(EXPERTS, WIDTH, seed=i),
        "experts": {"a": drawn(EXPERTS, WIDTH, 5, seed=i), "b": drawn(EXPERTS, 5, WIDTH, seed=i)},
    } for i in range(2)]
    return Problem({"out": drawn(WIDTH, 1), "blocks": blocks}, loss, batch=rows_of)


def trajectory(k, stack, split, data, expert, auxiliary, optimizer):
    m = mesh(data=data, expert=expert)
    p = model(m, k, auxiliary)
    step = fs.step(p.loss, optimizer or optim.sgd(0.1), layers=p.layers)
    step = stacked(step, stack, m, {"expert": lambda s, m: expert_shard(s, m, "blocks/*/experts/*")})
    part = m.axis("data").rank * expert + m.axis("expert").rank
    return followed(step, p, split, pure="donate" not in stack, part=part)


def check(k, stack, split, data, expert, tolerance=2e-5, optimizer=None):
    auxiliary = 0.0 if "accumulate" in stack else 0.1       # a product of sums is no sum over microbatches
    expected = ranks(1)(trajectory, k, (), (ROWS,), 1, 1, auxiliary, optimizer)[0]
    for got in ranks(data * expert)(trajectory, k, stack, split, data, expert, auxiliary, optimizer):
        assert_close(got, expected, tolerance, f"{' > '.join(stack)} on {split}")


STACKS = [
    (("expert",), 1, 2), (("expert",), 1, 4), (("expert", "checkpoint", "accumulate"), 1, 2), (("data_parallel", "expert"), 2, 2),
    (("expert", "zero1"), 2, 2), (("zero2", "checkpoint", "expert"), 2, 2), (("expert", "accumulate", "zero3", "donate"), 2, 2),
]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("stack, data, expert", STACKS, ids=str)
def test_stacks_on_uneven_splits_are_the_bare_step(k, stack, data, expert):
    check(k, stack, (5, 3) if data * expert == 2 else (3, 1, 2, 2), data, expert)


def test_adam_state_is_the_bare_steps():
    # Adam divides by the root of nu: where a gradient is near zero, sums in another order show a hundred times enlarged
    check(2, ("zero3", "expert"), (3, 1, 2, 2), 2, 2, 2e-3, optim.adam(1e-3))


@given(st.integers(1, 9), st.sampled_from([1, 2]))
@settings(max_examples=20)
def test_without_a_capacity_it_is_the_sum_over_experts(tokens, k):
    x, router = drawn(tokens, WIDTH), drawn(EXPERTS, WIDTH, seed=2)
    params = {"a": drawn(EXPERTS, WIDTH, 5), "b": drawn(EXPERTS, 5, WIDTH)}
    got = mixture_of_experts(x, router, pair, params, ONE, k=k)
    p = (x @ router.t()).softmax(-1)
    gates, chosen = p.topk(k)
    gates = gates if k == 1 else gates / gates.sum(-1, keepdim=True)
    every = pair(params, x.expand(EXPERTS, -1, -1))
    expected = sum(gates[:, i, None] * every[chosen[:, i], torch.arange(tokens)] for i in range(k))
    torch.testing.assert_close(got.out, expected)
    share = torch.bincount(chosen[:, 0], minlength=EXPERTS) / tokens
    torch.testing.assert_close(got.balance, EXPERTS * (share * p.mean(0)).sum())
    torch.testing.assert_close(got.z, (x @ router.t()).logsumexp(-1).square().mean())
    assert got.dropped == 0


def test_a_capacity_keeps_first_choices_in_the_order_of_tokens():
    x, router = torch.ones(5, 1), torch.tensor([[2.0], [1.0], [0.0], [0.0]])
    same = lambda w, x: x * w
    run = lambda **kw: mixture_of_experts(x, router, same, torch.ones(4, 1, 1), ONE, **kw)
    one = run(k=1, capacity_factor=1.0, min_capacity=1)                     # ceil(5 / 4) = 2 of 5 tokens
    assert one.dropped == 3 and (one.out[:2] > 0).all() and (one.out[2:] == 0).all()
    assert run(k=1, capacity_factor=1.0, min_capacity=4).dropped == 1
    two = run(k=2, capacity_factor=1.0, min_capacity=1)                     # ceil(10 / 4) = 3, of each expert
    assert two.dropped == 4 and torch.equal(two.out[:, 0] > 0, torch.tensor([True] * 3 + [False] * 2))


def test_elements_sent():
    def run():
        axis = mesh(expert=2).axis("expert")
        x = drawn(6, WIDTH).requires_grad_()
        params = {"a": drawn(2, WIDTH, 5), "b": drawn(2, 5, WIDTH)}
        with Counted(2, least=25) as counted:
            out = mixture_of_experts(x, drawn(EXPERTS, WIDTH), pair, params, axis, capacity_factor=2.0, min_capacity=1).out
            out.sum().backward()
        return counted.sent["all_to_all_single"]

    assert ranks(2)(run) == [4 * (EXPERTS * 6 * WIDTH) // 2] * 2            # 2 exchanges, and 2 in backward, of room for 6


def test_mistakes():
    x, w = torch.ones(2, 1), torch.ones(3, 1)
    with pytest.raises(ValueError, match="k must be 1 or 2, got 3"):
        mixture_of_experts(x, w, pair, {}, ONE, k=3)
    with pytest.raises(ValueError, match="3 experts for k=1 on the 2 ranks of axis 'expert', which must divide them"):
        mixture_of_experts(x, w, pair, {}, Axis("expert", 0, 0, 2, None), k=1)
    step = fs.step(lambda p, x, key: fs.mean(p["w"] * x), optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"expert_shard: the spec for 'experts/\*' names no leaf"):
        expert_shard(step, fs.mesh(expert=1), "experts/*").init({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="no axis 'experts'"):
        expert_shard(step, fs.mesh(expert=1), "w", axis="experts")
