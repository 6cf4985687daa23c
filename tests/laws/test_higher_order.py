"""A step is a function: torch.func goes through it, under every transform, and first-order runs pay nothing for that."""
import pytest
import torch
from torch.func import grad, vmap

import fspeed as fs
from fspeed import optim, random
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.step import step as make_step
from fspeed.testing import assert_close, mesh, problem, ranks
from fspeed.testing.stacks import EXACT, PLACEMENTS, stacked

NAMES = [n for n in (*EXACT, *PLACEMENTS)]


def learned_rate(stack):
    """d loss after three unrolled steps / d learning rate, and d that once more."""
    p, grid = problem(), mesh(data=1)

    def after(rate):
        step = stacked(make_step(p.loss, optim.sgd(rate), layers=p.layers, trainable=p.trainable), stack, grid)
        state = step.init(p.params, random.key(1))
        for i in range(3):
            state, metrics = step(state, p.batch(i, 4))
        return metrics["loss"]

    rate = torch.tensor(0.3)
    return {"first": grad(after)(rate), "second": grad(grad(after))(rate)}


@pytest.mark.parametrize("name", NAMES)
def test_grad_goes_through_unrolled_steps(name):
    expected = learned_rate(())
    assert expected["first"].abs() > 1e-3 and expected["second"].abs() > 1e-3
    assert_close(ranks(1)(learned_rate, (name,))[0], expected, 1e-4, name)      # sums in float32, thrice differentiated


def ensemble(stack, lanes):
    """Three steps of several seeds at once."""
    p, grid = problem(), mesh(data=1)
    step = stacked(make_step(p.loss, optim.adamw(1e-2), layers=p.layers, trainable=p.trainable), stack, grid)
    states = [step.init(problem(seed).params, random.key(seed)) for seed in range(3)]
    run = vmap(step, in_dims=(0, None)) if lanes else step
    batch = p.batch(0, 4)
    if lanes:
        state = tree_map(lambda *x: torch.stack(x), *states)
        for _ in range(3):
            state, metrics = run(state, batch)
        return [tree_map(lambda x, i=i: x[i], (state.params, metrics)) for i in range(3)]
    out = []
    for state in states:
        for _ in range(3):
            state, metrics = step(state, batch)
        out.append((state.params, metrics))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_a_step_is_an_ensemble(name):
    got, expected = (ranks(1)(ensemble, (name,), lanes)[0] for lanes in (True, False))
    # batched matrix products sum in another order, and Adam divides by the root of what is small
    assert_close(got, expected, 2e-3, name)


def sharded_rate(stack, size):
    """d loss / d learning rate when each rank differentiates its own copy: psum's transpose is psum."""
    p, grid = problem(rate=0.0), mesh(data=size)
    rank = torch.distributed.get_rank() if size > 1 else 0

    def after(rate):
        step = stacked(make_step(p.loss, optim.sgd(rate), layers=p.layers, trainable=p.trainable), stack, grid)
        state = step.init(p.params, random.key(1))
        for i in range(2):
            state, metrics = step(state, tree_map(lambda x: x.tensor_split(size)[rank], p.batch(i, 4)))
        return metrics["loss"] / size           # every rank has the whole loss: their sum is one

    return grad(after)(torch.tensor(0.3))


@pytest.mark.parametrize("name", ["data_parallel", "zero1", "zero2", "zero3"])
def test_grad_through_steps_on_two_ranks(name):
    expected = ranks(1)(sharded_rate, (), 1)[0]
    parts = ranks(2)(sharded_rate, (name,), 2)
    assert_close(sum(parts), expected, 1e-4, name)


def test_a_loss_that_closes_over_a_differentiated_tensor_keeps_its_gradient():
    """By autograd from outside, with nothing but a closure to tell that somebody is watching."""
    scale = torch.tensor(2.0, requires_grad=True)
    step = make_step(lambda p, batch, key: fs.mean(p["w"] * batch * scale), optim.sgd(0.1))
    state, _ = step(step.init({"w": torch.tensor(1.0)}), torch.tensor([1.0, 3.0]))
    (got,) = torch.autograd.grad(tree_leaves(state.params)[0], scale)
    assert got == pytest.approx(-0.2)           # w - 0.1 * 2 * scale
