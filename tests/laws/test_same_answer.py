"""Laws 1 to 4: in every stack, in every order, on every split, a step gives the bare step's answer; it is pure and stable."""
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fspeed import optim
from fspeed.step import step as make_step
from fspeed.testing import assert_close, check_stack, mesh, problem, ranks, splits, stacks
from fspeed.testing.check import ROWS, followed, trajectory
from fspeed.testing.stacks import EXACT, PLACEMENTS
from fspeed.transforms.data_parallel import data_parallel
from fspeed.transforms.zero_shard import zero_shard


@pytest.mark.parametrize("placement", ["data_parallel", "zero1", "zero2", "zero3"])
def test_every_order_of_every_stack_on_two_ranks(placement):
    others = ("accumulate", "checkpoint", "bf16")
    for chosen in itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(4)):
        for stack in itertools.permutations((placement, *chosen)):
            check_stack(stack, (5, 2))


@pytest.mark.parametrize("n, examples", [(1, 40), (2, 30), (3, 30)])
def test_any_stack_on_any_split(n, examples):
    @settings(max_examples=examples)
    @given(stacks(n), splits(ROWS, n))
    def law(stack, split):
        check_stack(stack, split)

    law()


def test_adam_state_is_the_bare_steps():
    @settings(max_examples=10)
    @given(stacks(2).filter(lambda s: not {"bf16", "fp16"} & set(s)), splits(ROWS, 2))
    def law(stack, split):
        # Adam divides by the root of nu: where a gradient is near zero, sums in another order show a hundred times enlarged
        check_stack(stack, split, optimizer=optim.adamw(1e-3, weight_decay=0.1), tolerance=2e-3)

    law()


def on_a_grid(placements, split):
    """The bare step under placements over the axes of a 2 x 2 mesh, the first innermost: (axis, ZeRO stage, 0 for replicas)."""
    p, grid = problem(), mesh(replica=2, data=2)
    step = make_step(p.loss, optim.sgd(0.5), layers=p.layers, trainable=p.trainable)
    for axis, stage in placements:
        step = zero_shard(step, grid, axis=axis, stage=stage) if stage else data_parallel(step, grid, axis=axis)
    return followed(step, p, split)


REPLICATED = [order for stage in (1, 2, 3) for order in itertools.permutations((("replica", 0), ("data", stage)))]
SHARDED_TWICE = [(("data", 3), ("replica", 3)), (("replica", 1), ("data", 3)), (("replica", 3), ("data", 2))]


@pytest.mark.parametrize("placements", REPLICATED + SHARDED_TWICE, ids=str)
def test_two_axes(placements):
    expected = ranks(1)(trajectory, (), (ROWS,), None, None, None)[0]
    for got in ranks(4)(on_a_grid, placements, (3, 0, 2, 2)):
        assert_close(got, expected, 2e-5, str(placements))


@pytest.mark.parametrize("name", [*EXACT])
def test_without_ranks_an_exact_transform_changes_no_bit_or_only_the_order_of_sums(name):
    bare, got = (ranks(1)(trajectory, stack, (ROWS,), None, None, None)[0] for stack in ((), (name,)))
    assert_close(got, bare, 2e-6 if name == "accumulate" else 0.0, name)


@pytest.mark.parametrize("placement", [*PLACEMENTS])
def test_the_mask_and_the_draws_are_those_of_global_rows(placement):
    """Case 38: the loss with dropout is the same, to rounding, on one rank and on three."""
    check_stack((placement,), (1, 4, 2), tolerance=2e-5)


@given(st.integers(1, 9))
@settings(max_examples=5)
def test_any_number_of_microbatches(n):
    from fspeed.transforms.accumulate import accumulate

    check_stack(("zero3", "n"), (4, 3), more={"n": lambda s, m: accumulate(s, n)})


def test_sums_do_not_lose_what_is_small():
    """Case 9: bf16 gradients 256 and 1 add to 257."""
    from fspeed.loss import mean
    from fspeed.transforms.accumulate import accumulate
    from fspeed.transforms.mixed_precision import mixed_precision

    loss = lambda p, batch, key: mean(p["w"] * batch)
    step = accumulate(mixed_precision(make_step(loss, optim.sgd(1.0))), 2)
    state, _ = step(step.init({"w": torch.tensor(0.0)}), torch.tensor([256.0, 1.0]))
    assert step.params(state)["w"] == -257 / 2
