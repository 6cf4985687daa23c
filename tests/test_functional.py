"""Unchanged modules as functions: what a plain torch loop computes, buffers in the state, dropout by key."""
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fspeed as fs
from fspeed import optim, random
from fspeed.functional import nested
from fspeed.layer import lookup
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import assert_close, assert_equal, mesh, ranks
from fspeed.testing.stacks import stacked

T = torch.tensor


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conv_net():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)))


def step_of(module, layers=(), optimizer=None, score=lambda out: (out**2).flatten(1).mean(1)):
    """A step that trains a module to put out zeros, and its first state."""
    apply, params, buffers = fs.functional(module, layers=layers)

    def loss(p, x, key, buffers=()):
        out, new = apply(p, buffers, x, key=key)
        return (fs.mean(score(out)), {}, new) if tree_leaves(buffers) else fs.mean(score(out))

    step = fs.step(loss, optimizer or optim.sgd(0.1), layers=layers)
    return step, lambda step: step.init(params, random.key(1), buffers if tree_leaves(buffers) else ())


def flat(tree):
    return [x for x in tree_leaves(tree)]


# ---------------------------------------------------------------- against plain torch
@pytest.mark.parametrize("layers", [(), "1", ["0", "1", "3"]])
def test_batch_norm_trains_as_in_a_torch_loop(layers):
    """Running statistics are in the state, fp32; case 24."""
    module, torch_module = conv_net(), conv_net()
    step, init = step_of(module, layers)
    state = init(step)
    sgd = torch.optim.SGD(torch_module.parameters(), 0.1)
    for i in range(3):
        x = drawn(5, 3, seed=i)
        state, metrics = step(state, x)
        loss = (torch_module(x) ** 2).mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        torch.testing.assert_close(metrics["loss"], loss.detach())
    for name, expected in (*torch_module.named_parameters(), *torch_module.named_buffers()):
        i, leaf = name.split(".")
        tree = step.params(state) if leaf in ("weight", "bias") else state.buffers
        torch.testing.assert_close(tree[i][leaf], expected.detach())
    torch_module.eval()
    torch.testing.assert_close(step.evaluate(state, x)["loss"], (torch_module(x) ** 2).mean().detach())
    for (name, x), (_, y) in zip(module.state_dict().items(), conv_net().state_dict().items(), strict=True):
        assert torch.equal(x, y), f"{name} of the module itself changed"


MODULES = {
    "a transformer": (lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False), "layers/*", (3, 4, 8)),
    "a decoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
                        ["self_attn", "linear1"], (3, 4, 8)),
    "an LSTM": (lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True), (), (2, 5, 3)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (), (2, 3)),
    "a module in itself twice": (lambda: (lambda m: nn.Sequential(m, nn.Tanh(), m))(nn.Linear(3, 3)), (), (2, 3)),
    "a list of modules": (lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(11)]), "*", (2, 3)),
    "group norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)), "1", (2, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_any_module_is_what_it_was(name):
    make, layers, shape = MODULES[name]
    module, x = seeded(make), drawn(*shape)
    apply, params, buffers = fs.functional(module, layers=layers)
    first = lambda out: out[0] if isinstance(out, tuple) else out
    for key in (random.key(0), None):
        module.train(key is not None)
        expected = first(module(x))
        torch.testing.assert_close(first(apply(params, buffers, x, key=key)[0]), expected.detach())
    step, init = step_of(module, layers, score=lambda out: (first(out) ** 2).flatten(1).mean(1))
    got = step.params(step(init(step), x)[0])
    module.train()
    grads = torch.autograd.grad((first(module(x)) ** 2).mean(), list(module.parameters()))
    expected = {n: p.detach() - 0.1 * g for (n, p), g in zip(module.named_parameters(), grads, strict=True)}
    for n, leaf in expected.items():
        torch.testing.assert_close(lookup(got, n.replace(".", "/")), leaf)


def test_a_padded_transformer_evaluates():
    """What is round the layers asks them for their sizes and their mode."""
    module = seeded(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    apply, params, buffers = fs.functional(module, layers="layers/*")
    x, pad = drawn(2, 3, 8), T([[False, False, True], [False, False, False]])
    module.eval()
    got, _ = apply(params, buffers, x, src_key_padding_mask=pad)
    torch.testing.assert_close(got[~pad], module(x, src_key_padding_mask=pad).detach()[~pad], rtol=1e-5, atol=1e-5)


def test_tied_weights_stay_one_leaf():
    """Case 12."""
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    module = seeded(Tied)
    step, init = step_of(module)
    state = init(step)
    assert len(tree_leaves(state.params)) == 1
    x = torch.arange(4)
    state, _ = step(state, x)
    params = step.params(state)
    (g,) = torch.autograd.grad((module(x) ** 2).mean(), module.embed.weight)
    torch.testing.assert_close(params["embed"]["weight"], (module.embed.weight - 0.1 * g).detach())
    assert torch.equal(params["head"]["weight"], params["embed"]["weight"])


class Asks(nn.Module):
    """Asks its layer for the mode of what is in it, as torch's own encoder does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(3, 1)

    def forward(self, x):
        return self.inner(x, x, x)[0] * (2 if self.inner.out_proj.training else 1) * (2 if self.inner.training else 1)


def test_a_layer_is_in_the_mode_of_the_module():
    apply, params, buffers = fs.functional(Asks(), layers="inner")
    train, evaluate = (apply(params, buffers, drawn(2, 3), key=key)[0] for key in (random.key(0), None))
    torch.testing.assert_close(train, 4 * evaluate)


# ---------------------------------------------------------------- buffers
class Averages(nn.Module):
    """Buffers written in three ways, one that is not, and one that two names have."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        for name in ("inplace", "assigned", "copied", "constant"):
            self.register_buffer(name, torch.ones(3))
        self.register_buffer("shared", self.constant)
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.training:
            self.inplace.mul_(0.5).add_(mean)
            self.assigned = self.assigned * 0.5 + mean
            self.copied.copy_(self.copied * 0.5 + mean)
        return x * self.w * self.constant + self.shared * self.hidden


def test_buffers_come_back_however_they_are_written():
    module = Averages()
    apply, params, buffers = fs.functional(module)
    x = drawn(4, 3)
    _, new = apply(params, buffers, x, key=random.key(0))
    for name in ("inplace", "assigned", "copied"):
        torch.testing.assert_close(new[name], 0.5 + x.mean(0))
        assert torch.equal(buffers[name], torch.ones(3)), "a buffer that was passed in changed"
    for name in ("constant", "shared", "hidden"):
        assert new[name] is buffers[name]
    assert all(a is b for a, b in zip(flat(apply(params, buffers, x)[1]), flat(buffers), strict=True)), "evaluation writes nothing"


def averaged(stack, rows):
    step, init = step_of(nn.Sequential(Averages(), nn.BatchNorm1d(3, momentum=0.5)))
    step = stacked(step, stack, mesh(data=len(rows)), {"two parts": lambda s, m: fs.accumulate(s, 2)})
    state = init(step)
    state, _ = step(state, drawn(sum(rows), 3).split(list(rows))[dist.get_rank()])
    return state.buffers


@pytest.mark.parametrize("stack", [
    ("data_parallel",), ("zero3",), ("zero3", "checkpoint"), ("two parts", "zero2"), ("zero1", "bf16"),
])
def test_buffers_are_the_row_weighted_mean_over_ranks_and_microbatches(stack):
    """Case 24: equal on all ranks; what is linear in the batch is exactly the whole batch's."""
    expected = ranks(1)(averaged, (), (9,))[0]
    found = ranks(2)(averaged, stack, (5, 4))
    tolerance = 1e-2 if "bf16" in stack else 1e-6
    for got in found:
        assert_equal(got, found[0], "buffers of two ranks")
        for name in ("inplace", "assigned", "copied"):
            torch.testing.assert_close(got[0][name], expected[0][name], rtol=tolerance, atol=tolerance)
        assert got[1]["num_batches_tracked"] == 1 and got[1]["running_mean"].dtype == torch.float32


def test_a_rank_without_rows_leaves_buffers_alone():
    def run(rows):
        step, init = step_of(Averages())
        step = fs.data_parallel(step, mesh(data=2))
        return step(init(step), drawn(sum(rows), 3).split(list(rows))[dist.get_rank()])[0].buffers

    for got in ranks(2)(run, (3, 0)):
        torch.testing.assert_close(got["inplace"], 0.5 + drawn(3, 3).mean(0))
    for got in ranks(2)(run, (0, 0)):
        assert torch.equal(got["inplace"], torch.ones(3))


# ---------------------------------------------------------------- randomness
def dropping(stack, rows, layers):
    tail = lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Dropout(0.3))
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), tail()))
    step, init = step_of(module, layers)
    step = stacked(step, stack, mesh(data=len(rows)))
    state = init(step)
    for i in range(2):
        state, metrics = step(state, drawn(sum(rows), 3, seed=i).split(list(rows))[dist.get_rank()])
    return step.params(state), metrics


@pytest.mark.parametrize("layers", [(), "2"])
@pytest.mark.parametrize("stack", [("data_parallel",), ("zero3", "checkpoint"), ("accumulate", "checkpoint", "zero2")])
def test_dropout_is_a_function_of_key_and_row(stack, layers):
    """Under recompute and under any split."""
    expected = ranks(1)(dropping, (), (5,), layers)[0]
    assert_equal(ranks(1)(dropping, (), (5,), layers)[0], expected, "the same run")
    for got in ranks(2)(dropping, stack, (2, 3), layers):
        assert_close(got, expected, 2e-5, f"{stack}")


def test_each_dropout_and_each_layer_draws_for_itself():
    module = nn.Sequential(*[nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)) for _ in range(2)])
    for layers in ((), "*"):
        apply, params, buffers = fs.functional(nn.Sequential(nn.Linear(1, 1), module), layers=layers)
        masks = [apply(params, buffers, torch.ones(400, 1), key=random.key(i))[0] for i in range(2)]
        assert not torch.equal(*masks)
    apply, *_ = fs.functional(module)
    out, _ = apply({}, {}, torch.ones(4000, 1), key=random.key(0))
    assert 150 < (out > 0).sum() < 350      # kept with probability 1/16: four masks that know nothing of each other
    one = lambda: nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5))
    apply, params, _ = fs.functional(nn.Sequential(one(), one()), layers="*")
    out, _ = apply(tree_map(torch.ones_like, params), {}, torch.ones(4000, 1), key=random.key(0))
    assert 850 < (out > 0).sum() < 1150     # 1/4: two layers' masks


class Draws(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.w, self.fn = nn.Parameter(torch.ones(3)), fn

    def forward(self, x):
        return x * self.w * self.fn(x, self.training)


DRAWS = {
    "rand": lambda x, on: torch.rand(3), "randn_like": lambda x, on: torch.randn_like(x),
    "normal_": lambda x, on: torch.empty(3).normal_(),
    "cauchy_": lambda x, on: x.clone().cauchy_(), "geometric_": lambda x, on: x.clone().geometric_(0.5),
    "log_normal_": lambda x, on: x.clone().log_normal_(), "poisson": lambda x, on: torch.poisson(x),
    "randperm": lambda x, on: torch.randperm(3), "normal": lambda x, on: torch.distributions.Normal(0.0, 1.0).sample((3,)),
    "bernoulli": lambda x, on: torch.distributions.Bernoulli(T(0.5)).sample(),
    "fractional_max_pool2d": lambda x, on: F.fractional_max_pool2d(torch.ones(1, 4, 4), 2, output_size=2).mean(),
}
DROPOUTS = {
    "dropout_": lambda x, on: torch.dropout_(x.clone(), 0.5, on),
    "native_dropout": lambda x, on: torch.native_dropout(x, 0.5, on)[0],
    "alpha_dropout": lambda x, on: torch.alpha_dropout(x, 0.5, on),
    "feature_dropout": lambda x, on: torch.feature_dropout(x, 0.5, on),
    "rrelu": lambda x, on: F.rrelu(x, training=on), "dropout1d": lambda x, on: F.dropout1d(x[None], training=on)[0],
    "feature_alpha_dropout": lambda x, on: F.feature_alpha_dropout(x, 0.5, on),
    "lstm": lambda x, on: nn.LSTM(3, 3, 2, dropout=0.5).train(on)(x)[0],
    "scaled_dot_product_attention": lambda x, on: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * on),
    "multi_head_attention_forward": lambda x, on: nn.MultiheadAttention(3, 1, dropout=0.5).train(on)(x, x, x)[0],
}


@pytest.mark.parametrize("name", [*DRAWS, *(n for n in DROPOUTS if n != "lstm" and n != "multi_head_attention_forward")])
def test_other_randomness_is_refused_by_name(name):
    apply, params, buffers = fs.functional(Draws({**DRAWS, **DROPOUTS}[name]))
    with pytest.raises(RuntimeError, match=f"random numbers by {name}"):
        apply(params, buffers, torch.ones(2, 3), key=random.key(0))
    if name in DROPOUTS:
        apply(params, buffers, torch.ones(2, 3))


@pytest.mark.parametrize("make, name", [
    (lambda: nn.LSTM(3, 3, 2, dropout=0.5), "lstm"), (lambda: nn.GRU(3, 3, 2, dropout=0.5), "gru"),
    (lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), "multi_head_attention_forward"),
])
def test_dropout_inside_one_function_of_torch_is_refused(make, name):
    apply, params, buffers = fs.functional(make())
    x = torch.ones(2, 3, 3 if "Trans" not in type(make()).__name__ else 4)
    with pytest.raises(RuntimeError, match=f"random numbers by {name}"):
        apply(params, buffers, x, key=random.key(0))
    apply(params, buffers, x)


# ---------------------------------------------------------------- the rest
def test_threads_do_not_meet_in_the_module():
    step, init = step_of(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))), layers="2")

    def run(i):
        state = init(step)
        state = state._replace(params=tree_map(lambda x: x + i / 10, state.params))
        for _ in range(5):
            state, _ = step(state, torch.ones(6, 8))
        return step.params(state)

    expected, found = {i: run(i) for i in range(3)}, {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: run(i)})) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert_equal(found, expected, "threads")


def test_layers_that_match_nothing_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match="matches no submodule with parameters; there are 0, 1, 3"):
        fs.functional(conv_net(), layers="layers/*")


def test_globs_choose_layers_of_step_and_module_alike():
    step, init = step_of(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), "b")
    assert init(step).params.names == ("root", "b")


def test_nested():
    assert nested({"a.0.w": 1, "a.2.w": 2}) == {"a": {"0": {"w": 1}, "2": {"w": 2}}}
    assert nested({"0": 1, "1": 2}) == [1, 2] and nested({}) == {}
