"""Sequence parallelism: in any stack over data x seq, the bare step's answer, wherever the valid tokens are."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fspeed as fs
from fspeed import optim, random
from fspeed.shard.collectives import psum
from fspeed.shard.mesh import Axis
from fspeed.shard.sequence import positions, ring_attention, split_sequence, ulysses_attention
from fspeed.testing import Problem, assert_close, mesh, ranks, stacks
from fspeed.testing.check import followed
from fspeed.testing.count import Counted
from fspeed.testing.stacks import PRECISIONS, stacked
from fspeed.transforms.sequence_shard import position_key, sequence_shard

VOCAB, WIDTH, LENGTH, ROWS = 12, 6, 8, 6
ATTENTION = {"ulysses": ulysses_attention, "ring": ring_attention}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype) * 0.5


def batch(seed, rows):
    """Tokens, targets, and a mask whose tokens are all in the first chunk, so on rank 0 only."""
    x = torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return x, x.roll(-1, 1), torch.arange(LENGTH).expand(rows, -1) < 2


def transformer(kind, axis):
    @fs.layer
    def block(p, x, key):
        q, k, v = ((x @ w).unflatten(-1, (3, 2)).transpose(1, 2) for w in p["qkv"])
        y = ATTENTION[kind](q, k, v, axis).transpose(1, 2).flatten(2) @ p["o"]
        key = position_key(key, x.shape[1], axis)
        return x + random.dropout(key, torch.tanh(y).flatten(0, 1), 0.2).view(x.shape)

    def loss(params, data, key):
        x, y, valid = data
        h = params["wte"][x] + params["wpe"][positions(x.shape[1], axis)]
        for i, p in enumerate(params["blocks"]):
            h = block(p, h, None if key is None else key.fold_in(i))
        losses = F.cross_entropy((h @ params["wte"].t()).flatten(0, 1).float(), y.flatten(), reduction="none").view(y.shape)
        return fs.mean(losses, valid), {"all": fs.mean(losses.detach())}

    blocks = [{"qkv": drawn(3, WIDTH, WIDTH, seed=i), "o": drawn(WIDTH, WIDTH, seed=i)} for i in range(2)]
    return Problem({"wte": drawn(VOCAB, WIDTH), "wpe": drawn(LENGTH, WIDTH), "blocks": blocks}, loss, batch=batch)


def trajectory(kind, stack, split, seq, optimizer=None):
    m = mesh(data=len(split), seq=seq)
    p = transformer(kind, m.axis("seq"))
    step = fs.step(p.loss, optimizer or optim.sgd(0.5), layers=p.layers)
    step = stacked(step, stack, m, {"seq": lambda s, m: sequence_shard(s, m)})
    return followed(step, p, split, pure="donate" not in stack, part=m.axis("data").rank)


def check(kind, stack, split, seq, tolerance=2e-5, optimizer=None):
    low = [name for name in stack if name in PRECISIONS]
    expected = ranks(1)(trajectory, kind, low, (ROWS,), 1, optimizer)[0]
    for got in ranks(len(split) * seq)(trajectory, kind, stack, split, seq, optimizer):
        # bf16 rounds each part of a sum over the axis to 8 bits: tenths of the greatest element
        assert_close(got, expected, 0.1 if low else tolerance, f"{kind}: {' > '.join(stack)} on {split} x {seq}")


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("data, seq", [(1, 2), (1, 4), (2, 2)])
def test_any_stack_is_the_bare_step(kind, data, seq):
    @settings(max_examples=6)
    @given(stacks(data, always=["seq"]), st.integers(0, ROWS))
    def law(stack, first):
        check(kind, stack, (first, ROWS - first) if data == 2 else (ROWS,), seq)

    law()


def test_adam_state_is_the_bare_steps():
    # Adam divides by the root of nu: where a gradient is near zero, sums in another order show a hundred times enlarged
    check("ring", ("zero3", "seq", "checkpoint"), (4, 2), 2, 2e-3, optim.adamw(1e-3))


def attention_errors(kind, heads, kv_heads, causal, size):
    axis = mesh(seq=size).axis("seq")
    normal = lambda h, seed: drawn(2, h, 24, 4, seed=seed, dtype=torch.float64)
    inputs, c = (normal(heads, 0), normal(kv_heads, 1), normal(kv_heads, 2)), normal(heads, 3)
    part = lambda x: split_sequence(x, axis, 2)
    y, pull = torch.func.vjp(lambda *qkv: ATTENTION[kind](*map(part, qkv), axis, causal=causal), *inputs)
    whole = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected, back = torch.func.vjp(whole, *inputs)
    pairs = [(y, part(expected)), *zip((psum(g, axis) for g in pull(part(c))), back(c), strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (3, 3), (6, 2), (2, 1)])
def test_attention_and_its_gradients_whatever_the_heads(kind, size, heads, kv_heads):
    for causal in (True, False):
        assert max(ranks(size)(attention_errors, kind, heads, kv_heads, causal, size)) < 1e-12      # float64


def elements(kind, backward):
    axis = mesh(seq=2).axis("seq")
    x = drawn(2, 4, 8, 4).requires_grad_()
    with Counted(2) as counted:
        y = ATTENTION[kind](x, x, x, axis)
        if backward:
            y.sum().backward()
    return 2 * counted.sent["all_to_all_single"]        # what comes in is counted half, as if each rank kept half


@pytest.mark.parametrize("passes", [1, 2])
def test_elements_sent(passes):
    n = 2 * 4 * 8 * 4
    assert ranks(2)(elements, "ulysses", passes == 2) == [4 * n * passes] * 2       # half of which goes to the rank itself
    assert ranks(2)(elements, "ring", passes == 2) == [2 * n * passes] * 2


def test_a_balanced_rank_does_half_of_the_products():
    from fspeed.shard import sequence

    def products():
        seen, plain = [], sequence.attended
        sequence.attended = lambda q, k, v, causal=False: seen.append(q.shape[2] * k.shape[2]) or plain(q, k, v, causal)
        try:
            x = drawn(1, 1, 6, 2)
            ring_attention(x, x, x, mesh(seq=4).axis("seq"))
        finally:
            sequence.attended = plain
        return seen

    assert ranks(4)(products) == [[36, 18, 18, 18]] * 4


def test_several_terms_with_weights_of_their_own():
    def run(seq):
        m = mesh(seq=seq)
        loss = lambda p, b, key: {"a": fs.mean(p["w"] * b[0], b[1]), "b": fs.mean(p["w"] ** 2 * b[0])}
        weigh = lambda b: {"a": b[1].sum(), "b": torch.tensor(float(b[0].numel()))}
        step = fs.step(loss, optim.sgd(0.1), weights=weigh)
        step = sequence_shard(step, m) if seq > 1 else step
        data = (drawn(3, 8), (torch.arange(8) < 2).expand(3, -1).float())
        state, metrics = step(step.init({"w": torch.tensor(2.0)}), data)
        return step.params(state), metrics

    expected = ranks(1)(run, 1)[0]
    for got in ranks(2)(run, 2):
        assert_close(got, expected, 1e-6, "two terms")


def test_mistakes():
    axis = Axis("seq", 0, 0, 2, None)
    with pytest.raises(ValueError, match="2 ranks of axis 'seq' take 2 equal chunks each of a sequence, but dim 1 of"):
        split_sequence(torch.ones(2, 6), axis)
    with pytest.raises(ValueError, match="no axis 'sequence'"):
        sequence_shard(fs.step(lambda p, x, key: fs.mean(x), optim.sgd(0.1)), fs.mesh(seq=1), axis="sequence")
    for fn in ATTENTION.values():
        with pytest.raises(ValueError, match="a number of heads of k and v that divides that of q"):
            fn(torch.ones(1, 3, 4, 2), torch.ones(1, 2, 4, 2), torch.ones(1, 2, 4, 2), axis)
