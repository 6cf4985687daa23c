"""Law 8: the compiled step equals the eager step, in every stack; what jit promises besides."""
import pytest
import torch
from hypothesis import given, settings
from test_trace import OneAndHalf
from torch.utils._python_dispatch import TorchDispatchMode

import fspeed as fs
from fspeed import optim
from fspeed.shard.pytree import tree_leaves
from fspeed.testing import assert_close, check_stack, ranks, splits, stacks
from fspeed.testing.check import ROWS
from fspeed.testing.count import Counted, allocated_peak
from fspeed.testing.pool import mesh

square = fs.layer(lambda p, x: torch.tanh(x @ p["w"]))
PARAMS = {"l": [{"w": torch.eye(8) + 0.1} for _ in range(2)], "b": torch.zeros(8)}


def loss(params, batch, key):
    for p in params["l"]:
        batch = square(p, batch)
    return fs.mean(fs.random.dropout(key, batch + params["b"], 0.5) ** 2)


def bare(optimizer=None, loss=loss):
    return fs.step(loss, optimizer or optim.adamw(0.1), layers="l/*")


def three_steps(step):
    state, losses = step.init(PARAMS), []
    for seed in range(3):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses, step.params(state), step.evaluate(state, batch)


@pytest.mark.parametrize("n, examples", [(1, 3), (2, 3)])
def test_any_stack_traced(n, examples):
    @settings(max_examples=examples)
    @given(stacks(n, most=2, always=["jit"]), splits(ROWS, n))
    def law(stack, split):
        check_stack(stack, split)

    law()


CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.1))._replace(apply=None)     # its update becomes a graph


@pytest.mark.parametrize("how, optimizer", [({}, None), ({"donate": True}, CLIPPED), ({"scope": "layer"}, None)])
def test_inductor_s_step_is_the_eager_step(how, optimizer):
    # a compiler may fuse multiplications and additions: float32, a few roundings, enlarged by Adam where gradients are small
    assert_close(three_steps(fs.jit(bare(optimizer), **how)), three_steps(bare(optimizer)), 1e-4, "the compiled step")


@pytest.mark.parametrize("how", [{}, {"scope": "layer"}], ids=str)
def test_a_custom_backward_is_not_lost(how):
    layer = fs.layer(lambda p, x: OneAndHalf.apply(p["w"] * x))
    step = fs.jit(fs.step(lambda p, batch, key: fs.mean(layer(p["l"], batch)), optim.sgd(1.0), layers="l"), **how)
    state, _ = step(step.init({"l": {"w": torch.tensor(0.0)}}), torch.ones(3))
    assert step.params(state)["l"]["w"] == -1.5


@pytest.mark.parametrize("optimizer", [None, CLIPPED], ids=["one pass", "a graph"])
def test_a_donated_state_is_written_over_and_gone(optimizer):
    step = fs.jit(bare(optimizer), donate=True, backend="eager")
    old = step.init(PARAMS)
    places = [x.data_ptr() for x in tree_leaves(old.params)]
    new, _ = step(old, torch.ones(6, 8))
    assert [x.data_ptr() for x in tree_leaves(new.params)] == places
    with pytest.raises(RuntimeError, match="this state was donated"):
        step(old, torch.ones(6, 8))


def test_a_donated_step_holds_no_second_state():
    big = {"w": torch.zeros(256, 256)}
    make = lambda **how: fs.jit(fs.step(lambda p, batch, key: fs.mean((batch @ p["w"]) ** 2), optim.adamw(0.1)), **how)

    def peak(step):
        box = [step(step.init(big), torch.ones(2, 256))[0]]
        return min(allocated_peak(lambda: box.append(step(box.pop(), torch.ones(2, 256))[0])) for _ in range(2))

    one = 4 * 256 * 256
    assert peak(make(donate=True)) < 2 * one <= 4 * one <= peak(make())        # a gradient; and three more leaves


def branches(params, batch, key):
    value = batch.sum()
    if value > 0:                                                               # the line that looks
        return fs.mean(batch + params["b"])
    return fs.mean(batch - params["b"])


def test_a_loss_that_looks_at_values_is_told_where():
    step = fs.jit(bare(loss=branches))
    with pytest.raises(TypeError, match=r"test_jit\.py:\d+, in branches: `if value > 0:.*` looks at the value of a tensor"):
        step(step.init(PARAMS), torch.ones(6, 8))


def test_compilations_are_counted_told_and_bounded(capfd):
    step = fs.jit(bare(), backend="eager", limit=2)
    state = step.init(PARAMS)
    for rows in (6, 4, 6, 4):
        state, _ = step(state, torch.ones(rows, 8))
    first, second = fs.compilations(step)
    assert first.startswith("the gradients: ") and second.endswith("1 (6, 8) torch.float32 -> (4, 8) torch.float32")
    with pytest.raises(RuntimeError, match=r"compiled 2 times.* now come others: 1 \(4, 8\) torch.float32 -> \(5, 8\)"):
        step(state, torch.ones(5, 8))


def order_of_stage_3(backend):
    """Gathers G, reductions S, waits g and s, and matrix products m of a compiled step of 4 layers, in order; bytes gathered."""
    params = {"l": [{"w": torch.eye(32)} for _ in range(4)], "b": torch.zeros(32)}
    step = fs.jit(fs.zero_shard(bare(), mesh(data=2)), backend=backend, donate=True)
    state, batch, order = step.init(params), torch.ones(3, 32), Order()
    state, _ = step(state, batch)
    with order:
        state, _ = step(state, batch)
    with Counted(2) as counted:
        step(state, batch)
    return "".join(order.seen), counted.gathered


class Order(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen, self.size = [], {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out, name = op(*args, **(kwargs or {})), op._opname
        letter = {"all_gather_into_tensor": "G", "all_to_all_single": "S", "mm": "m", "addmm": "m"}.get(name, "")
        if letter in ("G", "S") and out.numel() < 500:
            return out              # of a few numbers
        if letter in ("G", "S"):
            self.size[out.data_ptr()] = letter.lower()
        if name == "wait_tensor":
            letter = self.size.pop(args[0].data_ptr(), "")
        self.seen.append(letter)
        return out


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_in_the_graph_stage_3_gathers_again_early_and_reduces_late(backend):
    """A layer is gathered while the one before computes, and, but for the last one, again for backward; two are there at once."""
    order, gathered = ranks(2)(order_of_stage_3, backend, timeout=120)[0]
    root, forward, last, backward, first = "GgGm", "gGm" * 3, "mmSm", "gGmsSm" + "gmsSm", "sSs"
    assert order == root + forward + last + backward + first
    assert gathered == 2 * 32 * 32 * 4


LAYERS = {"layer <lambda>, forward", "layer <lambda>, backward"}


@pytest.mark.parametrize("scope, parts", [("step", {"the gradients", "evaluate"}), ("layer", LAYERS)])
def test_what_was_compiled_is_found_on_disk(scope, parts):
    """By Inductor's cache of graphs, which asks for an environment of shapes, and for operators that it knows."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        for found in ("miss", "hit"):
            counters.clear()
            step = fs.jit(bare(), scope=scope)
            three_steps(step)
            assert {line.split(":")[0] for line in fs.compilations(step)} == parts
            seen = {k: n for k, n in counters["inductor"].items() if k.startswith("fxgraph_cache_")}
            assert seen == {f"fxgraph_cache_{found}": len(fs.compilations(step))}


def test_it_is_outermost_wherever_it_stands():
    step = fs.accumulate(fs.jit(bare(), backend="eager"), 2)
    assert_close(three_steps(step), three_steps(fs.accumulate(bare(), 2)), 1e-5, "the compiled step")
    assert len(fs.compilations(step)) == 2                                      # the gradients, and evaluate


def test_torch_func_goes_through():
    steps = fs.jit(bare(optim.sgd(0.1)), backend="eager"), bare(optim.sgd(0.1))
    batch = torch.ones(6, 8)

    def after(rate, step):
        state = step.init(PARAMS)
        state = state._replace(params=state.params.map(lambda name, group: {k: v * rate for k, v in group.items()}))
        return step(state, batch)[1]["loss"]

    got, expected = (torch.func.grad(after)(torch.tensor(0.5), step) for step in steps)
    assert_close(got, expected, 1e-6, "the compiled step")


@pytest.mark.parametrize("how, says", [({"scope": "all"}, "scope must be 'step' or 'layer'"), ({"backend": "xla"}, "inductor")])
def test_bad_arguments(how, says):
    with pytest.raises(ValueError, match=says):
        fs.jit(bare(), **how)
