"""Faults that users of other training systems reported, as properties. The other rows are named where they are tested."""
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fspeed as fs
from fspeed import optim
from fspeed.shard.piece import live
from fspeed.shard.pytree import tree_flatten, tree_leaves
from fspeed.testing import assert_close, assert_equal, mesh, ranks, splits
from fspeed.testing.stacks import stacked

T = torch.tensor
PLACEMENTS = ["data_parallel", "zero1", "zero2", "zero3"]
STAGES = PLACEMENTS[1:]
scale = fs.layer(lambda p, x: p["w"] * x)
per_token = lambda p, batch, key: fs.mean(scale(p["l"], batch["x"]), batch["on"])


def toy(optimizer=None, loss=per_token, layers="l"):
    return fs.step(loss, optimizer or optim.sgd(1.0), layers=layers)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


# ---------------------------------------------------------------- the mean, however a batch is split
def slope(stack, tokens, parts):
    """d loss / dw where a token's loss is w * x; each rank's tokens in microbatches of any lengths, padded."""
    mine = tokens[dist.get_rank()]
    width = max([len(m) for m in itertools.chain(*tokens)] + [1])
    x = torch.zeros(len(mine), width)
    on = torch.zeros(len(mine), width, dtype=torch.bool)
    for i, micro in enumerate(mine):
        x[i, :len(micro)], on[i, :len(micro)] = T(micro), True
    step = stacked(toy(), stack, mesh(data=len(tokens)), {"micros": lambda s, m: fs.accumulate(s, parts)})
    state, metrics = step(step.init({"l": {"w": T(0.0)}}), {"x": x, "on": on})
    return -float(step.params(state)["l"]["w"]), float(metrics["loss"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_token_weighs_the_same(placement):
    """Case 1: rank 0's microbatches [1], [2,2,2], rank 1's [3,3], [4]*6: 37/12, not 2.5."""
    tokens = [[[1.0], [2.0] * 3], [[3.0] * 2, [4.0] * 6]]
    for got, loss in ranks(2)(slope, (placement, "micros"), tokens, 2):
        assert got == pytest.approx(37 / 12, rel=1e-6) and loss == 0


@settings(max_examples=15)
@given(splits(12, 4), st.sampled_from(PLACEMENTS))
def test_every_split_of_the_twelve_tokens(sizes, placement):
    """Case 1."""
    tokens = iter([1.0, 2.0, 2.0, 2.0, 3.0, 3.0] + [4.0] * 6)
    a, b, c, d = ([next(tokens) for _ in range(n)] for n in sizes)
    for got, _ in ranks(2)(slope, ("micros", placement), [[a, b], [c, d]], 2):
        assert got == pytest.approx(37 / 12, rel=1e-6)


@pytest.mark.parametrize("stack", [*([p] for p in PLACEMENTS), ["zero3", "checkpoint", "accumulate"]])
def test_five_samples_on_four_ranks(stack):
    """Case 2: the mean is over five; a rank without rows, or without tokens, adds 0, never NaN."""
    found = ranks(4)(slope, tuple(stack), [[[1.0], [2.0]], [[3.0], []], [[4.0, 5.0]], []], 1)
    assert [round(got, 5) for got, _ in found] == [3.0] * 4


@pytest.mark.parametrize("gradients, total", [([1.0, 2.0, 3.0], 6.0), ([1.0] * 6, 6.0)])
def test_every_microbatch_counts_once(gradients, total):
    """Cases 3 and 8: gradients 1, 2, 3 add to 6; of six of 1 the mean is exactly 1."""
    step = fs.accumulate(fs.step(lambda p, b, key: fs.Loss((p["w"] * b).sum(), 1), optim.sgd(1.0)), len(gradients))
    metrics, grads = step.value_and_grad(step.init({"w": T(1.0)}), T(gradients))
    assert grads["root"]["w"] * metrics["loss"].weight == total
    assert grads["root"]["w"] == total / len(gradients)


@pytest.mark.parametrize("stack", [[s] + c for s in STAGES for c in ([], ["checkpoint"])])
def test_a_module_used_twice(stack):
    """Case 7: f = W(Wx), W = 2, x = 3: dW = 12."""
    def run():
        loss = lambda p, x, key: fs.mean(scale(p["l"], scale(p["l"], x)))
        step = stacked(toy(loss=loss), stack, mesh(data=2))
        return step.params(step(step.init({"l": {"w": T(2.0)}}), T([3.0]))[0])["l"]["w"]

    assert ranks(2)(run) == [2 - 12] * 2


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_leaf_used_first_in_the_last_microbatch(placement):
    """Case 10: computed in bf16, summed in fp32."""
    def run(stack, size):
        loss = lambda p, x, key: fs.mean(p["a"] * x + (p["b"] * x if x.max() > 2 else 0))
        step = stacked(fs.step(loss, optim.sgd(1.0)), stack, mesh(data=size), {"three": lambda s, m: fs.accumulate(s, 3)})
        x = T([1.0, 1.0, 1.0, 1.0, 4.0, 4.0]).view(3, 2).tensor_split(size, 1)[dist.get_rank()].reshape(-1)
        return step.params(step(step.init({"a": T(0.0), "b": T(0.0)}), x)[0])

    assert_equal(ranks(1)(run, ("bf16", "three"), 1)[0], {"a": T(-2.0), "b": T(-8 / 6)}, "one process")
    for got in ranks(2)(run, ("bf16", "three", placement), 2):
        assert_equal(got, {"a": T(-2.0), "b": T(-8 / 6)}, placement)


# ---------------------------------------------------------------- leaves of all kinds
def trained(params, loss, stack, rows, layers=(), trainable="**", optimizer=None):
    step = stacked(fs.step(loss, optimizer or optim.adam(0.1), layers=layers, trainable=trainable), stack, mesh(data=len(rows)))
    state = step.init(params)
    for i in range(2):
        state, metrics = step(state, (drawn(sum(rows), 8) + i).split(list(rows))[dist.get_rank()])
    return step.params(state), metrics


KINDS = {
    "frozen under checkpoint (case 14)": (
        {"l": {"w": drawn(8, 8), "scale": torch.linspace(0, 1, 1024)}},
        lambda p, x, key: fs.mean(fs.layer(lambda q, x: torch.tanh(x @ q["w"]) * q["scale"][:8])(p["l"], x)), "l", "l/w",
    ),
    "empty leaves (case 17)": (
        {"a": drawn(8), "z": torch.zeros(0, 8), "b": drawn(24)},
        lambda p, x, key: fs.mean((x * p["a"]).sum(-1) * p["b"].sum() + (x @ p["z"].t()).sum(-1)), (), "**",
    ),
    "fewer elements than ranks (case 17)": ({"a": T(1.5)}, lambda p, x, key: fs.mean(torch.tanh(x * p["a"])), (), "**"),
    "dtypes (case 21)": (
        {"w": drawn(8).bfloat16(), "b": drawn(8), "i": torch.arange(8)},
        lambda p, x, key: fs.mean(torch.tanh(x * p["w"].float() + p["b"] * p["i"])), (), "**",
    ),
    "strided (case 22)": ({"w": drawn(6, 8).t()}, lambda p, x, key: fs.mean(torch.tanh(x @ p["w"])), (), "**"),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_of_all_kinds_train_as_in_one_process(kind, placement):
    """Cases 14, 17, 21 and 22."""
    params, loss, layers, trainable = KINDS[kind]
    stack = (placement, "checkpoint")
    expected = ranks(1)(trained, params, loss, (), (5,), layers, trainable)[0]
    form = lambda tree: [(x.dtype, x.shape) for x in tree_leaves(tree)]
    for got in ranks(2)(trained, params, loss, stack, (3, 2), layers, trainable):
        assert form(got[0]) == form(params)
        # bf16 parameters; and Adam divides by the root of nu
        assert_close(got, expected, 1e-2 if kind.startswith("dtypes") else 1e-4, kind)


def test_integers_are_never_differentiated():
    """Case 21."""
    step = fs.step(lambda p, x, key: fs.mean(x * p["w"] * p["i"]), optim.adam(0.1))
    state = step.init({"w": torch.ones(8), "i": torch.arange(8)})
    _, grads = step.value_and_grad(state, torch.ones(2, 8))
    assert len(tree_leaves(grads)) == 1 and len([x for x in tree_leaves(state.opt_state) if x.shape == (8,)]) == 2


def test_a_leaf_of_three_elements_on_eight_ranks():
    """Case 19: most shards are empty; fused Adam and a loss scale."""
    def run(n):
        step = fs.step(lambda p, x, key: fs.mean(torch.tanh(x * p["w"])), optim.adam(0.1))
        step = fs.mixed_precision(step, torch.float16, loss_scaling=fs.LossScaling(initial=4.0))
        step = fs.zero_shard(step, mesh(data=n)) if n > 1 else step
        state, metrics = step(step.init({"w": T([1.0, 2.0, 3.0])}), torch.ones(8 // n, 3))
        return step.params(state)["w"], metrics["skipped"]

    (expected, _), = ranks(1)(run, 1)
    for got, skipped in ranks(8)(run, 8):
        assert skipped == 0
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)     # fp16


def test_what_is_frozen_or_tied_is_saved(tmp_path):
    """Cases 12 and 13: bitwise equal after restoring into a state that began with other numbers, and tied again."""
    def run(path, stack):
        def params(seed):
            g = torch.Generator().manual_seed(seed)
            w = torch.randn(5, generator=g)
            return {"w": w, "again": w, "frozen": torch.randn(7, generator=g), "n": torch.randint(9, (3,), generator=g)}

        loss = lambda p, x, key: fs.mean(torch.tanh(x * p["w"]) * p["again"] * p["frozen"][:5])
        step = fs.step(loss, optim.adam(0.1), trainable=["w", "again"])
        step = stacked(step, stack, mesh(data=dist.get_world_size()))
        state, _ = step(step.init(params(0)), torch.ones(2, 5))
        fs.save(path, state)
        back = fs.restore(path, step.init(params(1)))
        assert_equal(back, state, "restored")
        whole = step.params(back)
        assert torch.equal(whole["frozen"], params(0)["frozen"]) and torch.equal(whole["n"], params(0)["n"])
        assert whole["w"] is whole["again"] and len(live(back.params)) == len(tree_leaves(back.opt_state)) // 2
        return step(back, torch.ones(2, 5))[0].params, step(state, torch.ones(2, 5))[0].params

    for stack in ((), ("zero1",), ("zero2",), ("zero3",)):
        for resumed, straight in ranks(2 if stack else 1)(run, str(tmp_path / "-".join(("s", *stack))), stack):
            assert_equal(resumed, straight, f"the next step under {stack}")


OPTIMIZERS = {
    "adam": lambda lr: optim.adam(lr), "sgd": lambda lr: optim.sgd(lr, momentum=0.9), "lamb": lambda lr: optim.lamb(lr),
    "muon": lambda lr: optim.muon(lr), "adafactor": lambda lr: optim.adafactor(lr),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_are_five_and_five_after_a_resume(name, tmp_path):
    """Cases 33 and 47: counts, moments and learning rates go on, on one stack; a save that fails, case 34, is in test_save.py."""
    def run(path):
        rates = []
        schedule = optim.warmup_cosine_decay_schedule(0.0, 0.1, 4, 12)
        noted = lambda count: rates.append(float(schedule(count))) or schedule(count)
        step = fs.step(lambda p, x, key: fs.mean(torch.tanh(x @ p["w"])), OPTIMIZERS[name](noted))
        step = fs.zero_shard(step, mesh(data=2))
        state, found = step.init({"w": drawn(4, 4)}), []
        for i in range(10):
            if i == 5:
                straight = state
                fs.save(path, state)
                state = fs.restore(path, step.init({"w": torch.zeros(4, 4)}))
                assert_equal(state, straight, "restored")
            rates.clear()
            state, _ = step(state, drawn(3, 4) + i)
            found.append(rates[0])
        return found, [float(schedule(i)) for i in range(10)]

    for found, expected in ranks(2)(run, str(tmp_path / "s")):
        assert found == expected


# ---------------------------------------------------------------- norms, decay and modes of Adam
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_norm_is_the_whole_gradients(placement):
    """Case 25: shards of gradients 3 and 4 have norm 5 on both ranks; clipped to 1: 0.6 and 0.8."""
    def run():
        p = {"a": torch.zeros(16), "b": torch.zeros(16)}                    # one to a rank
        loss = lambda p, x, key: fs.mean(p["a"][0] * 3 * x + p["b"][0] * 4 * x)
        step = stacked(fs.step(loss, optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0))), (placement,), mesh(data=2))
        state = step.init(p)
        _, grads = step.value_and_grad(state, torch.ones(1))
        out = step.params(step(state, torch.ones(1))[0])
        return optim.global_norm(grads), T([out["a"][0], out["b"][0]])

    for norm, moved in ranks(2)(run):
        assert norm == 5
        torch.testing.assert_close(moved, T([-0.6, -0.8]))


@pytest.mark.parametrize("sizes", [{"data": 2}, {"replica": 2, "data": 2}, {"data": 2, "model": 2}], ids=str)
def test_replicated_leaves_count_once(sizes):
    """Case 26: a sharded gradient of 4 beside a replicated one of 3: norm 5 on any mesh."""
    def run():
        from fspeed.shard.piece import shard
        from fspeed.tree import chooser, cut

        m = mesh(**sizes)
        place = lambda name, group: shard(group, m.axis("data")) if name == "l" else group
        tree = cut({"l": {"w": T([4.0])}, "r": T([3.0])}, chooser("l"), place=(("some", place),), axes=m.axes)
        return optim.global_norm(tree)

    assert ranks(math.prod(sizes.values()))(run) == [5] * math.prod(sizes.values())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_decay_spares_what_the_mask_spares(placement):
    """Case 46: zero gradients, decay on matrices only: biases keep their bits, weights shrink by 1 - 0.1 lr."""
    def run():
        mask = lambda params: {k: {n: x.dim() > 1 for n, x in v.items()} for k, v in params.items()}
        optimizer = optim.adamw(0.5, weight_decay=0.1, mask=mask)
        step = stacked(toy(optimizer, lambda p, x, key: fs.mean(0 * p["l"]["w"].sum() * x), ()), (placement,), mesh(data=2))
        return step.params(step(step.init({"l": {"w": drawn(5, 3), "b": drawn(7), "s": T(2.0)}}), torch.ones(1))[0])

    for got in ranks(2)(run):
        assert torch.equal(got["l"]["b"], drawn(7)) and got["l"]["s"] == 2
        torch.testing.assert_close(got["l"]["w"], drawn(5, 3) * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("placement", ["", *PLACEMENTS])
@pytest.mark.parametrize("mode", ["Adam", "AdamW"])
def test_both_modes_of_decay_are_torchs(mode, placement):
    """Case 52: decay 0.1 in the gradient (Adam) or beside the moments (AdamW), to 1e-6, wherever the state lies."""
    loss = lambda p, x, key: fs.mean(torch.tanh(x @ p["w"]))

    def run(stack, n):
        optimizer = optim.adamw(0.01, weight_decay=0.1) if mode == "AdamW" else optim.chain(
            optim.add_decayed_weights(0.1), optim.adam(0.01))
        step = stacked(fs.step(loss, optimizer), stack, mesh(data=n))
        state = step.init({"w": drawn(8, 8)})
        for i in range(5):
            state, _ = step(state, (drawn(4, 8) + i).tensor_split(n)[dist.get_rank()])
        return step.params(state)["w"]

    w = drawn(8, 8).requires_grad_()
    theirs = getattr(torch.optim, mode)([w], 0.01, weight_decay=0.1)
    for i in range(5):
        theirs.zero_grad()
        loss({"w": w}, drawn(4, 8) + i, None).value().backward()
        theirs.step()
    for got in ranks(2 if placement else 1)(run, (placement,) if placement else (), 2 if placement else 1):
        torch.testing.assert_close(got, w.detach(), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_jvp_of_a_sharded_loss(placement):
    """Case 40: d loss / d parameters along a direction, through gathers and sums."""
    def run(stack, n):
        import warnings

        warnings.simplefilter("ignore")
        loss = lambda p, x, key: fs.mean(torch.tanh(scale(p["l"], x)) * p["r"])
        step = stacked(toy(loss=loss), stack, mesh(data=n))
        state = step.init({"l": {"w": drawn(8)}, "r": T(2.0)})
        tangent = step.init({"l": {"w": drawn(8) ** 2}, "r": T(0.5)})
        x = drawn(4, 8).tensor_split(n)[dist.get_rank()]
        leaves, spec = tree_flatten(state.params)
        value = lambda *leaves: step.evaluate(state._replace(params=spec.unflatten(leaves)), x)["loss"]
        return torch.func.jvp(value, tuple(leaves), tuple(tree_leaves(tangent.params)))

    expected = ranks(1)(run, (), 1)[0]
    assert abs(expected[1]) > 1e-2
    for got in ranks(2)(run, (placement,), 2):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
