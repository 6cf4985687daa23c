"""Law 9: what a stack sends and holds is what its transforms promise, in every order; counted, not timed.

Elements sent: by the calls of the collectives, as a dispatch mode sees them. Bytes held between steps: by storages. Gathered
buffers alive at once: by their storages. Peaks: by the CPU allocator's events.
"""
import functools
import itertools

import pytest
import torch

import fspeed as fs
from fspeed import optim
from fspeed.shard.piece import ALIGN
from fspeed.step import step as make_step
from fspeed.testing import mesh, ranks
from fspeed.testing.count import Counted, allocated_peak, stored_bytes
from fspeed.testing.stacks import PLACEMENTS, stacked

N, M, WIDTH, DEPTH, VOCAB = 2, 3, 32, 5, 50
LAYER, ROOT = WIDTH * WIDTH + WIDTH, VOCAB * WIDTH
LAYERS, P = DEPTH * LAYER, DEPTH * LAYER + ROOT
assert LAYER % (N * ALIGN) == 0 and ROOT % (N * ALIGN) == 0         # so that there is no padding


def tanh_step(optimizer, depth=DEPTH):
    @fs.layer
    def block(p, x):
        return torch.tanh(x @ p["w"] + p["b"])

    def loss(params, tokens, key):
        x = params["root"][tokens]
        for p in params["blocks"]:
            x = block(p, x)
        return fs.mean((x @ params["root"].t()) ** 2)

    params = {
        "root": torch.randn(VOCAB, WIDTH),
        "blocks": [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)} for _ in range(depth)],
    }
    return make_step(loss, optimizer, layers="blocks/*"), params


def costs(stack):
    """Elements sent, calls, gathered elements alive at once, elements held between steps."""
    step, params = tanh_step(optim.adamw(1e-3))
    step = stacked(step, stack, mesh(data=N))
    state = step.init(params)
    tokens = torch.arange(M)
    state, _ = step(state, tokens)
    with Counted(N) as counted:
        state, _ = step(state, tokens)
    return counted.total, dict(counted.calls), counted.gathered / 4, stored_bytes((state.params, state.opt_state)) / 4


def peak(stack, depth=DEPTH):
    """The most elements alive at once in a step, beyond the state; the least of six, as gloo lets go a moment after its wait."""
    step, params = tanh_step(optim.adamw(1e-3), depth)
    step = stacked(step, stack, mesh(data=N) if set(stack) & set(PLACEMENTS) else None)
    tokens = torch.arange(M)
    box = [step(step.init(params), tokens)[0]]
    return min(allocated_peak(lambda: box.append(step(box.pop(), tokens)[0])) for _ in range(6)) / 4


def orders(placement, others=("accumulate", "checkpoint", "bf16", "skip_nonfinite")):
    for k in range(4):
        for chosen in itertools.combinations(others, k):
            yield from itertools.permutations((placement, *chosen))


def sent(placement, microbatches, again=0):
    """`again`: elements of layers that backward gathers again."""
    whole = {
        "data_parallel": 2 * P, "zero1": 2 * P, "zero2": (1 + microbatches) * P, "zero3": microbatches * (2 * P + again)
    }[placement]
    return whole * (N - 1) // N


@functools.cache
def every_order(placement):
    stacks = list(orders(placement))
    return list(zip(stacks, ranks(N)(lambda: [costs(stack) for stack in stacks])[0], strict=True))


@pytest.mark.parametrize("placement", ["data_parallel", "zero1", "zero2", "zero3"])
def test_elements_sent_and_reductions_made_in_every_order(placement):
    for stack, (total, calls, _, _) in every_order(placement):
        m = M if "accumulate" in stack else 1
        expected = sent(placement, m, LAYERS if "checkpoint" in stack else LAYERS - LAYER)      # the last layer is still there
        assert total == expected, f"{stack} sent {total}, expected {expected}"
        reductions = calls.get("all_reduce", 0) + calls.get("all_to_all_single", 0) + calls.get("reduce_scatter_tensor", 0)
        assert reductions == (DEPTH + 1) * (m if placement in ("zero2", "zero3") else 1), f"{stack} made {calls}"


@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_gathered_buffers_alive_at_once_in_every_order(placement):
    most = P if placement != "zero3" else 2 * LAYER + ROOT
    for stack, (_, _, gathered, _) in every_order(placement):
        assert gathered <= most, f"{stack} had {gathered} elements gathered at once, allowed {most}"


@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_a_rank_holds_its_share_between_steps(placement):
    """12P/N bytes: parameters and two moments; and the count."""
    for stack in ((placement,), ("accumulate", placement, "checkpoint"), ("bf16", placement)):
        assert ranks(N)(costs, stack)[0][3] == 3 * P / N + 1


@pytest.mark.parametrize("placement, most", [
    ("zero1", P + P + P + P / N),               # gathered, gradients, flat gradients of a group at a time, shards
    ("zero2", P + 4 * LAYER + ROOT + P / N),    # gathered; a layer's or the root's gradients, flat and sent; shards
    ("zero3", 3 * ROOT + 4 * LAYER + P / N),
])
def test_peak_beside_the_state(placement, most):
    """Donated, so that no second state is counted; activations of three tokens are the margin."""
    activations = 40 * M * WIDTH * DEPTH
    for stack in ((placement, "donate"), ("donate", placement), (placement, "accumulate", "donate")):
        seen = ranks(N)(peak, stack)[0]
        assert seen <= most + activations, f"{stack} peaked at {seen}, allowed {most + activations}"


def test_stage_3_costs_less_memory_than_2_and_2_than_1():
    """So deep that layers which gloo lets go late, on a busy machine, are less than a stage saves."""
    peaks = [ranks(N)(peak, (p, "donate"), 20)[0] for p in ("zero1", "zero2", "zero3")]
    assert peaks[0] > peaks[1] > peaks[2], peaks


def test_in_place_donation_holds_one_copy():
    pure, donated = map(peak, ((), ("donate",)))
    assert pure <= 4 * P + 100 and donated <= 2 * P + 100, (pure, donated)      # sums and means of gradients; and three copies


def test_checkpoint_keeps_only_arguments():
    """Activations between forward and backward: each layer's input and nothing else of it."""
    rows, width, depth = 200, 16, 8
    params = {"blocks": [{"w": torch.randn(width, width)} for _ in range(depth)]}

    @fs.layer
    def block(p, x):
        for _ in range(4):
            x = torch.tanh(x @ p["w"])
        return x

    def loss(params, x, key):
        for p in params["blocks"]:
            x = block(p, x)
        return fs.mean(x)

    bare = make_step(loss, optim.sgd(0.1), layers="blocks/*")
    peaks = {}
    half = fs.checkpoint(bare, where=lambda at: at.index % 2 == 0)
    for name, step in {"bare": bare, "all": fs.checkpoint(bare), "half": half}.items():
        state, x = step.init(params), torch.randn(rows, width)
        step(state, x)
        peaks[name] = allocated_peak(lambda step=step, state=state, x=x: step(state, x)) / (4 * rows * width)
    assert peaks["bare"] >= 4 * depth
    assert peaks["all"] <= depth + 10
    assert peaks["all"] < peaks["half"] < peaks["bare"]


def gather_and_reduce_bytes(order, reduce):
    """Bytes an element of what is gathered, and of what gradients are reduced in."""
    step, params = tanh_step(optim.sgd(1e-3))
    low = lambda s: fs.mixed_precision(s, torch.bfloat16, reduce=reduce)
    both = {"bf16": low, "zero3": lambda s: fs.zero_shard(s, mesh(data=N))}
    for name in order:
        step = both[name](step)
    state = step.init(params)
    with Counted(N) as counted:
        step(state, torch.arange(M))
    return tuple(counted.bytes[op] / counted.sent[op] for op in ("all_gather_into_tensor", "all_to_all_single"))


@pytest.mark.parametrize("reduce, size", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_order_says_what_is_gathered_and_reduce_says_what_is_summed(reduce, size):
    assert ranks(N)(gather_and_reduce_bytes, ("zero3", "bf16"), reduce)[0] == (2, size)
    assert ranks(N)(gather_and_reduce_bytes, ("bf16", "zero3"), reduce)[0] == (4, size)
