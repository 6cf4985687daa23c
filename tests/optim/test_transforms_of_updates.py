"""Every update is a function: torch.func differentiates and batches it, make_fx traces it."""
import math

import pytest
import torch
from optimizer_table import TABLE, drawn, trained
from torch.fx.experimental.proxy_tensor import make_fx

from fspeed import optim
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fspeed.testing import assert_close

every_row = pytest.mark.parametrize("name", TABLE)
SEEDS = 2


def without_empty(tree):
    return {k: v for k, v in tree.items() if k != "z"}


def loss(params):
    return sum((x.sin() * (1 + x)).sum() for x in tree_leaves(params))


def unrolled(opt, params, n):
    """Parameters after n steps down the loss's own gradients."""
    state = opt.init(params)
    for _ in range(n):
        updates, state = opt.update(torch.func.grad(loss)(params), state, params)
        params = optim.apply_updates(params, updates)
    return params


RATES = {
    "sgd": lambda lr: optim.sgd(lr, 0.9),
    "adam": optim.adam,
    "adamw": lambda lr: optim.adamw(lr, weight_decay=0.1, mask=lambda p: tree_map(lambda x: x.dim() > 1, p)),
    "lion": lambda lr: optim.lion(lr, weight_decay=0.1),
    "lamb": optim.lamb,
    "rmsprop": lambda lr: optim.rmsprop(lr, momentum=0.5),
    "adafactor": lambda lr: optim.adafactor(lr, 3),
    "muon": optim.muon,
    "scheduled": lambda lr: optim.adam(optim.warmup_cosine_decay_schedule(0.0, lr, 3, 20)),
    "clipped": lambda lr: optim.chain(optim.clip_by_global_norm(0.5), optim.adam(lr)),
    "injected": lambda lr: optim.inject_hyperparams(optim.adam)(learning_rate=lr),
}


@pytest.mark.parametrize("name", RATES)
def test_the_gradient_of_ten_steps_with_respect_to_the_learning_rate(name):
    params = without_empty(drawn(0, torch.float64))
    after = lambda lr: loss(unrolled(RATES[name](lr), params, 10))
    lr, h = torch.tensor(0.01, dtype=torch.float64), 1e-6
    slope = (after(lr + h) - after(lr - h)) / (2 * h)
    assert torch.func.grad(after)(lr).item() == pytest.approx(slope.item(), rel=1e-4)
    tracked = lr.clone().requires_grad_()
    after(tracked).backward()
    assert tracked.grad.item() == pytest.approx(slope.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "scheduled"])
def test_one_pass_does_not_lose_a_learning_rates_gradient(name):
    params, lr = drawn(0), torch.tensor(0.01, requires_grad=True)
    opt = RATES[name](lr)
    state = opt.init(params)
    for i in range(3):
        params, state = opt.apply(drawn(1 + i), state, params)
    loss(params).backward()
    assert lr.grad.abs() > 0


@every_row
def test_a_batch_of_runs_is_each_run(name):
    opt = TABLE[name](optim)
    params = [drawn(i, torch.float64) for i in range(SEEDS)]
    grads = [[drawn(100 + 10 * i + j, torch.float64) for i in range(SEEDS)] for j in range(2)]
    stacked = lambda trees: tree_map(lambda *xs: torch.stack(xs), *trees)
    spec = tree_flatten(params[0])[1]

    def run(params, *grads):
        as_tree = lambda leaves: tree_unflatten(spec, leaves)
        return tree_leaves(trained(opt, as_tree(params), [as_tree(g) for g in grads])[0])

    got = torch.func.vmap(run)(*(tree_leaves(stacked(t)) for t in (params, *grads)))
    expected = [trained(opt, p, [g[i] for g in grads])[0] for i, p in enumerate(params)]
    assert_close(got, tree_leaves(stacked(expected)), 1e-9, name)


@pytest.mark.parametrize("name", [n for n in TABLE if " " not in n or "masked" in n or "scheduled" in n])
def test_an_update_is_traced(name):
    opt = TABLE[name](optim)
    params = drawn(0)
    state = trained(opt, params, [drawn(5)])[1]
    leaves, spec = tree_flatten((drawn(1), state, params))
    update = lambda leaves: tree_leaves(opt.update(*tree_unflatten(spec, leaves)))
    traced = make_fx(update)(leaves)
    new = tree_leaves((drawn(2), trained(opt, params, [drawn(6)] * 4)[1], drawn(3)))
    for got, expected in zip(traced(new), update(new), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)       # a traced spectral norm rounds otherwise


@pytest.mark.parametrize("name", [n for n in TABLE if TABLE[n](optim).apply])
def test_one_pass_is_traced(name):
    """The trace holds no learning rate or count of the step that was traced, and no kernel that a compiler cannot look into."""
    opt = TABLE[name](optim)
    params = drawn(0)
    state = trained(opt, params, [drawn(5)])[1]
    leaves, spec = tree_flatten((drawn(1), state, params))
    step = lambda leaves: tree_leaves(opt.apply(*tree_unflatten(spec, [x.clone() for x in leaves])))
    traced = make_fx(step)(leaves)
    assert not [n for n in traced.graph.nodes if "fused" in str(n.target)]
    new = tree_leaves((drawn(2), trained(opt, params, [drawn(6)] * 4)[1], drawn(3)))
    for got, expected in zip(traced(new), step(new), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


SCHEDULES = {
    "warmup_cosine_decay": optim.warmup_cosine_decay_schedule(0.1, 0.3, 10, 30),
    "exponential": optim.exponential_decay(0.3, 10, 0.5, 3, True, 0.1),
    "onecycle": optim.cosine_onecycle_schedule(30, 0.3),
    "sgdr": optim.sgdr_schedule([{"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 3, "decay_steps": 10}] * 2),
    "one_cycle": optim.one_cycle(0.1, 1.0, 10, 20, 0.5, 10),
    "warmup_decay": optim.warmup_decay(0.0, 1.0, 10, 30),
    "warmup_cosine": optim.warmup_cosine(1.0, 10, 30),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_traced_and_batched(name):
    schedule, counts = SCHEDULES[name], torch.arange(50, dtype=torch.int32)
    expected = torch.tensor([schedule(int(i)) for i in counts], dtype=torch.float64)
    assert torch.equal(torch.func.vmap(schedule)(counts), expected)
    traced = make_fx(schedule)(counts[0])
    assert torch.equal(torch.stack([traced(i) for i in counts]), expected)


def test_a_schedules_values_are_differentiated():
    after = lambda peak: optim.warmup_cosine_decay_schedule(0.0, peak, 10, 30)(20)
    assert math.isclose(torch.func.grad(after)(torch.tensor(3.0, dtype=torch.float64)), 0.5)
