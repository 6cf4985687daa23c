"""The step itself: what it refuses, before anything is sent; what it needs of the world around it; and its contract."""
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fspeed as fs
from fspeed import optim, random
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import assert_equal, mesh, problem, ranks
from fspeed.testing.count import Counted

T = torch.tensor
scale = fs.layer(lambda p, x: torch.tanh(x * p["w"]))


def toy(layers="l/*", optimizer=None, loss=None):
    loss = loss or (lambda p, batch, key: fs.mean(scale(p["l"][0], batch) * p["r"]))
    return fs.step(loss, optimizer or optim.sgd(0.1), layers=layers), {"l": [{"w": torch.ones(3)}], "r": T(2.0)}


# ---------------------------------------------------------------- errors, before any collective
def closes_over(step, state, batch, m):
    w = torch.ones(3, requires_grad=True)
    uses = fs.layer(lambda p, x: x * p["w"] * w)
    step = fs.checkpoint(replace(step, loss=lambda p, b, key: fs.mean(uses(p["l"][0], b))))
    step(state, batch)


def indexed(step, state, batch, m):
    replace(step, loss=lambda p, b, key: fs.mean(b * p["l"][0]["w"]))(state, batch)


def no_axis(step, state, batch, m):
    fs.zero_shard(step, m, axis="model")


def ragged(step, state, batch, m):
    step(state, {"x": batch, "y": {"z": batch[:1]}})


def rows_of_another_batch(step, state, batch, m):
    step(state, fs.Batch(batch, torch.arange(5)))


def no_float(step, state, batch, m):
    step.init({"l": [{"w": torch.arange(3)}], "r": T(True)})


def no_layer(step, state, batch, m):
    fs.zero_shard(fs.step(step.loss, step.optimizer, layers="layers/*"), m).init({"l": [{"w": torch.ones(3)}], "r": T(2.0)})


def another_stack(step, state, batch, m):
    other = fs.step(step.loss, step.optimizer, layers=step.layers)
    step(other.init({"l": [{"w": torch.ones(3)}], "r": T(2.0)}), batch)


def another_extra(step, state, batch, m):
    fs.mixed_precision(step, torch.float16)(fs.mixed_precision(step).init({"l": [{"w": torch.ones(3)}], "r": T(2.0)}), batch)


def not_a_state(step, state, batch, m):
    step({"l": [{"w": torch.ones(3)}]}, batch)


def not_callable(step, state, batch, m):
    fs.step(torch.ones(3), optim.sgd(0.1))


def not_an_optimizer(step, state, batch, m):
    fs.step(step.loss, torch.optim.SGD)


def twice_over_one_axis(step, state, batch, m):
    fs.data_parallel(step, m)


def no_rows(step, state, batch, m):
    step(state, {"x": batch, "n": 3})


def nothing(step, state, batch, m):
    step(state, {})


def in_inference_mode(step, state, batch, m):
    with torch.inference_mode():
        step(state, batch)


REFUSED = {
    closes_over: (TypeError, "layer 'l/0' uses the differentiated tensor 'w'"),
    indexed: (TypeError, "layer 'l/0' were indexed with \\['w'\\]"),
    no_axis: (ValueError, "no axis 'model' in mesh\\(data=2\\)"),
    ragged: (ValueError, "disagree on their rows: 'x' has 2, 'y/z' has 1"),
    rows_of_another_batch: (ValueError, "disagree on their rows"),
    no_float: (ValueError, "no leaf to train: got 'r' \\(torch.bool\\), 'l/0/w' \\(torch.int64\\)"),
    no_layer: (ValueError, "layers='layers/\\*' matches nothing.*'l', 'l/0', 'l/0/w', 'r'"),
    another_stack: (ValueError, "another stack: its parameters are whole, this step keeps them flat shards over 'data'"),
    another_extra: (ValueError, "another stack: its extra has \\[\\], this step's transforms need \\['loss_scale'\\]"),
    not_a_state: (TypeError, "a step takes a State first, got a dict"),
    not_callable: (TypeError, "loss must be a function .* got a Tensor"),
    not_an_optimizer: (TypeError, "optimizer must be a pair of functions"),
    twice_over_one_axis: (ValueError, "axis 'data' is used by two transforms"),
    no_rows: (ValueError, "batch leaf 'n' is a int"),
    nothing: (ValueError, "the batch has no leaves"),
    in_inference_mode: (RuntimeError, "inference_mode"),
}


def refused(fault):
    """The error, and what was sent before it beside row numbers."""
    step, params = toy()
    m = mesh(data=2)
    step = fs.zero_shard(step, m)
    state, batch = step.init(params), torch.ones(2, 3)
    with Counted(2, least=3) as counted:
        try:
            fault(step, state, batch, m)
        except Exception as error:
            return error, counted.calls
    return None, counted.calls


@pytest.mark.parametrize("fault", REFUSED, ids=lambda f: f.__name__)
def test_a_clear_error_before_any_collective(fault):
    kind, says = REFUSED[fault]
    for error, calls in ranks(2)(refused, fault):
        with pytest.raises(kind, match=says):
            raise error
        if fault not in (closes_over, indexed):         # the root is gathered by then, the same on all ranks
            assert not calls


def test_ranks_that_return_different_metrics_are_told():
    """Names that differ would be summed with each other, and weights with totals."""
    def run(names):
        loss = lambda p, b, key: (fs.mean(p["w"] * b), {n: fs.mean(b) for n in names[dist.get_rank()]})
        step = fs.data_parallel(fs.step(loss, optim.sgd(0.1)), mesh(data=2))
        try:
            return step(step.init({"w": T(1.0)}), torch.ones(2))[1]
        except ValueError as error:
            return str(error)

    for names in ([["a"], ["z"]], [["a"], []], [["a", "b"], ["a"]]):
        assert all("returned different metrics" in said for said in ranks(2)(run, names))
    assert all(said["a"] == 1 for said in ranks(2)(run, [["a"], ["a"]]))


# ---------------------------------------------------------------- the world around it
def test_grad_mode_default_dtype_and_threads_change_nothing():
    p = problem()
    step = fs.accumulate(fs.checkpoint(fs.step(p.loss, optim.adamw(1e-2), layers=p.layers, trainable=p.trainable)), 2)

    def run():
        state = step.init(p.params, random.key(1))
        for i in range(2):
            state, metrics = step(state, p.batch(i, 4))
        return state, metrics

    expected = run()
    with torch.no_grad():
        assert_equal(run(), expected, "no_grad")
    torch.set_default_dtype(torch.float64)
    try:
        got = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(got[0], expected[0], "default dtype")
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: run()})) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(3):
        assert_equal(found[i], expected, f"thread {i}")


def test_batches_of_any_size_one_after_another():
    step, params = toy()
    state = step.init(params)
    for n in (3, 1, 0, 5):
        state, metrics = step(state, torch.ones(n, 3))
        assert metrics["loss"].isfinite() and (n or metrics["loss"] == 0)
    assert state.step == 4


def test_a_batch_of_no_rows_moves_nothing():
    """Case 2, at its end: no rows anywhere, whatever the loss says."""
    for loss in (lambda p, b, key: fs.mean(p["r"] * b), lambda p, b, key: (p["r"] * b).mean()):
        step, params = toy((), loss=loss)
        state, metrics = step(step.init(params), torch.ones(0, 3))
        assert metrics["loss"] == 0
        assert_equal(step.params(state), params, "params")


def test_unused_axes_change_nothing():
    def run(sizes):
        step, params = toy(optimizer=optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.1)))
        m = mesh(**sizes)
        step = fs.zero_shard(step, m)
        mine = torch.arange(6.0).view(6, 1).expand(6, 3).tensor_split(2)[m.axis("data").rank]
        state, metrics = step(step.init(params), mine)
        return step.params(state), metrics

    expected = ranks(2)(run, {"data": 2})[0]
    for got in ranks(4)(run, {"data": 2, "model": 2}):
        assert_equal(got, expected, "a mesh with an axis that is not used")


def test_evaluate_draws_nothing_and_works_in_inference_mode():
    p = problem()
    step = fs.step(p.loss, optim.sgd(0.1), layers=p.layers)
    state = step.init(p.params)
    with torch.inference_mode():
        inside = step.evaluate(state, p.batch(0, 4))
    assert_equal(inside, step.evaluate(state, p.batch(0, 4)), "evaluate")
    expected = p.loss(p.params, p.batch(0, 4), None)[0].value()
    torch.testing.assert_close(inside["loss"], expected)


def test_what_is_passed_in_stays():
    p = problem()
    before = tree_map(torch.clone, p.params)
    step = fs.step(p.loss, optim.adamw(0.1), layers=p.layers)
    step(step.init(p.params), p.batch(0, 3))
    assert_equal(p.params, before, "the parameters given to init")


def test_rows_may_come_with_the_batch():
    """A dropout mask is a function of the row's number, wherever the row is."""
    bit = 2.0 ** -torch.arange(4)[:, None]
    loss = lambda p, b, key: (fs.mean(p["w"] * b), {"kept": fs.mean(random.dropout(key, b, 0.5) * bit)})
    step = fs.step(loss, optim.sgd(0.0))
    state = step.init({"w": T(1.0)})
    kept = lambda rows: step(state, fs.Batch(torch.ones(4, 9), torch.tensor(rows)))[1]["kept"]
    assert kept([0, 1, 2, 3]) == step(state, torch.ones(4, 9))[1]["kept"]
    assert kept([4, 5, 6, 7]) != kept([0, 1, 2, 3])


def test_autograd_goes_on_into_the_batch():
    """As it does into what the loss closes over."""
    for wrap in (lambda s: s, fs.checkpoint, lambda s: fs.accumulate(s, 2), lambda s: fs.zero_shard(s, fs.mesh(data=1))):
        step, params = toy()
        step = wrap(step)
        after = lambda x, step=step, params=params: sum(x.sum() for x in tree_leaves(step(step.init(params), x)[0].params))
        x = torch.linspace(0, 1, 6).view(2, 3).requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(after(x), x)[0], torch.func.grad(after)(x.detach()))


def test_weights_of_terms_may_be_numbers():
    loss = lambda p, b, key: {"a": fs.Loss((p["w"] * b).sum(), len(b)), "b": fs.mean(2 * p["w"] * b)}
    step = fs.step(loss, optim.sgd(0.1), weights=lambda b: {"a": len(b), "b": T(3.0)})
    state, metrics = step(step.init({"w": T(1.0)}), torch.ones(3))
    assert metrics["loss"] == 3 and metrics["a"] == 1 and metrics["b"] == 2
    torch.testing.assert_close(step.params(state)["w"], T(0.7))


def test_terms_with_weights_of_their_own_are_validated():
    step = fs.step(lambda p, b, key: {"a": p["w"] * b}, optim.sgd(0.1), weights=lambda b: {"a": T(3.0)})
    with pytest.raises(TypeError, match="'a' must be an fs"):
        step(step.init({"w": T(1.0)}), torch.ones(3))


def test_a_state_is_a_tree():
    step, params = toy(optimizer=optim.adam(0.1))
    state = step.init(params)
    same = torch.utils._pytree.tree_map(lambda x: x, state)
    assert_equal(step(same, torch.ones(2, 3)), step(state, torch.ones(2, 3)), "a state through torch's pytrees")
    assert all(isinstance(x, torch.Tensor) for x in tree_leaves(state))
