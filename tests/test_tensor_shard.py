"""Tensor parallelism: in any stack over data x model, the bare step's answer; what is sent and held is what is promised."""
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fspeed as fs
from fspeed import optim, random
from fspeed.optim.norms import global_norm, leaf_norms
from fspeed.shard import tensor
from fspeed.shard.collectives import all_gather, psum
from fspeed.shard.mesh import Axis
from fspeed.shard.piece import only_live
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import Problem, assert_close, mesh, ranks, stacks
from fspeed.testing.check import followed
from fspeed.testing.count import Counted, stored_bytes
from fspeed.testing.stacks import PRECISIONS, stacked
from fspeed.transforms.tensor_shard import tensor_shard

VOCAB, WIDTH, LENGTH, ROWS, HEAD = 12, 8, 4, 6, 2
M = "model"
ONE = Axis("model", 1, 0, 1, None)
SPECS = {
    "wte": (M, None), "head": (M,),
    "blocks/*/[qkvu]": (M,), "blocks/*/[od]": (None, M), "blocks/*/ub": (M,), "blocks/*/frozen": (M,),
}
grid = lambda data, model: mesh(data=data, model=model)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.4


def batch(seed, rows):
    x = torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return x, x.roll(-1, 1)


def transformer(axis, sequence=None):
    """Tied embedding, dropout, a layer used twice, masked targets, frozen leaves that are divided and that are not."""
    @fs.layer
    def block(p, x, key):
        n = F.layer_norm(x, (WIDTH,), p["ln"])
        weights = (p[name] for name in "qkvo")
        x = x + tensor.parallel_attention(n, *weights, axis, head_dim=HEAD, sequence_dim=sequence)
        h = F.gelu(tensor.column_parallel_linear(x * p["mix"], p["u"], axis, p["ub"], sequence_dim=sequence)) * p["frozen"]
        h = tensor.row_parallel_linear(h, p["d"], axis, p["db"], sequence_dim=sequence)
        return x + (h if key is None or sequence is not None else random.dropout(key, h, 0.2))

    def loss(params, data, key):
        x, y = data
        h = tensor.vocab_parallel_embedding(x, params["wte"], axis, sequence_dim=sequence)
        for i, p in enumerate((*params["blocks"], params["blocks"][0])):
            h = block(p, h, None if key is None else key.fold_in(i))
        logits = tensor.column_parallel_linear(h * params["scale"], params["head"], axis, sequence_dim=sequence)
        losses = tensor.vocab_parallel_cross_entropy(logits, y, axis)
        return fs.mean(losses, y % 3 > 0), {"plain": fs.mean(losses.detach())}

    wte = drawn(VOCAB, WIDTH)
    params = {
        "wte": wte, "head": wte, "scale": torch.tensor(1.5), "table": torch.arange(3),
        "blocks": [{
            **{name: drawn(WIDTH, WIDTH, seed=i) for i, name in enumerate("qkvo")},
            "u": drawn(2 * WIDTH, WIDTH), "ub": drawn(2 * WIDTH), "d": drawn(WIDTH, 2 * WIDTH), "db": drawn(WIDTH),
            "ln": drawn(WIDTH) + 1, "mix": drawn(WIDTH), "frozen": drawn(2 * WIDTH),
        } for _ in range(2)],
    }
    return Problem(params, loss, trainable=lambda path: not path.endswith(("frozen", "mix")), batch=batch)


def trajectory(stack, split, model, optimizer=None, sequence=None):
    """What some steps of a stack give on a grid of data x model ranks."""
    m = grid(len(split), model)
    p = transformer(m.axis("model"), sequence)
    step = fs.step(p.loss, optimizer or optim.sgd(0.5), layers=p.layers, trainable=p.trainable)
    step = stacked(step, stack, m, {"tensor": lambda s, m: tensor_shard(s, m, SPECS)})
    return followed(step, p, split, pure="donate" not in stack, part=m.axis("data").rank)


def check(stack, split, model, tolerance=2e-5, **kwargs):
    low = [name for name in stack if name in PRECISIONS]
    expected = ranks(1)(trajectory, low, (ROWS,), 1, *kwargs.values())[0]
    for got in ranks(len(split) * model)(trajectory, stack, split, model, *kwargs.values()):
        where = f"{' > '.join(stack)} on {split} x {model}"
        if low:
            assert_near(got["params"], expected["params"], where)
        else:
            assert_close(got, expected, tolerance, where)


def assert_near(got, expected, where):
    """A short dtype rounds every part of a sum: a leaf may be off, but all of them only by a tenth of the way gone."""
    flat = lambda tree: torch.cat([x.reshape(-1).double() for x in tree_leaves(tree)])
    start = flat(transformer(ONE).params)
    assert (flat(got) - flat(expected)).norm() <= 0.1 * (flat(expected) - start).norm(), where


splits = st.integers(0, ROWS).map(lambda n: (n, ROWS - n))


@pytest.mark.parametrize("data, model", [(1, 2), (1, 4), (2, 2)])
def test_any_stack_is_the_bare_step(data, model):
    @settings(max_examples=8)
    @given(stacks(data, always=["tensor"]), splits)
    def law(stack, split):
        check(stack, split if data == 2 else (ROWS,), model)

    law()


@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_both_orders_with_every_stage(placement):
    for stack in itertools.permutations(("tensor", placement, "accumulate")):
        check(stack, (4, 2), 2)


def test_adam_state_is_the_bare_steps():
    @settings(max_examples=6)
    @given(stacks(2, always=["tensor"]).filter(lambda s: not {"bf16", "fp16"} & set(s)))
    def law(stack):
        # Adam divides by the root of nu: where a gradient is near zero, sums in another order show a hundred times enlarged
        check(stack, (4, 2), 2, tolerance=2e-3, optimizer=optim.adamw(1e-3, weight_decay=0.1))

    law()


def test_norms_and_dropout_between_the_parts_work_on_parts_of_the_sequence():
    """Without dropout: its mask by rows would be alike for every part."""
    expected = ranks(1)(trajectory, ("tensor",), (ROWS,), 1, None, 1)[0]
    for stack, split in ((("tensor",), (ROWS,)), (("zero3", "tensor", "checkpoint"), (4, 2))):
        for got in ranks(2 * len(split))(trajectory, stack, split, 2, None, 1):
            assert_close(got, expected, 2e-5, str(stack))


OPTIMIZERS = {
    "clip": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0)),
    "lamb": lambda: optim.lamb(0.01),
    "muon": lambda: optim.muon(0.01),
    "adafactor": lambda: optim.adafactor(0.01, min_dim_size_to_factor=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_and_whole_leaves(name):
    """What is divided counts once, and so does what is whole."""
    for stack, split in ((("tensor",), (ROWS,)), (("zero3", "tensor"), (4, 2))):
        check(stack, split, 2, tolerance=2e-3 if name != "clip" else 2e-5, optimizer=OPTIMIZERS[name]())


def norms_of(stack, data, model):
    m = grid(data, model)
    p = transformer(m.axis("model"))
    step = stacked(fs.step(p.loss, optim.sgd(0.1), layers=p.layers), stack, m, {"tensor": lambda s, m: tensor_shard(s, m, SPECS)})
    params = step.init(p.params).params
    return global_norm(only_live(params)), leaf_norms(only_live(params))


def test_the_norm_counts_each_parameter_once():
    expected = ranks(1)(norms_of, (), 1, 1)[0]
    for stack, data in ((("tensor",), 1), (("data_parallel", "tensor"), 2), (("tensor", "zero1"), 2)):
        for got in ranks(2 * data)(norms_of, stack, data, 2):
            torch.testing.assert_close(got, expected, msg=str(stack))


# ---------------------------------------------------------------- saving
def saved_and_restored(path):
    m = grid(2, 2)
    p = transformer(m.axis("model"))
    step = fs.zero_shard(tensor_shard(fs.step(p.loss, optim.adam(0.1), layers=p.layers), m, SPECS), m)
    part = tree_map(lambda x: x.split([4, 2])[m.axis("data").rank], batch(0, ROWS))
    state, _ = step(step.init(p.params), part)
    fs.save(path, state)
    again = fs.restore(path, step.init(p.params))
    equal = lambda a, b: all(map(torch.equal, tree_leaves(a), tree_leaves(b)))
    return equal(state, again) and equal(step(state, part)[0], step(again, part)[0])


def test_a_state_in_slices_is_saved_and_restored(tmp_path):
    assert ranks(4)(saved_and_restored, str(tmp_path / "run")) == [True] * 4


# ---------------------------------------------------------------- cost
def sent_and_held(microbatches):
    m = grid(1, 2)
    p = transformer(m.axis("model"))
    step = tensor_shard(fs.step(p.loss, optim.adam(0.1), layers=p.layers), m, SPECS)
    step = fs.accumulate(step, microbatches)
    state = step.init(p.params)
    with Counted(2, least=1) as counted:
        step(state, batch(0, ROWS))
    return sum(counted.bytes.values()), stored_bytes(state.params)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_sent_and_held_are_those_of_the_formulas(microbatches):
    uses, tokens, half = 3, ROWS * LENGTH, 1                        # 2 (T - 1) / T = 1
    linears = (2 * uses + 1) * tokens * WIDTH * 2                   # row parallel and the embedding, forward and backward
    entropy = tokens * (1 + 2 + 2)                                  # the maximum, two sums, and backward
    whole = microbatches * uses * (WIDTH * 3) + microbatches        # ln, mix, db of each use of a block, and scale
    metrics = 16 * 8                                                # once a step
    sent, held = ranks(2)(sent_and_held, microbatches)[0]
    assert sent == 4 * half * (linears + entropy + whole) + metrics, (sent, linears, entropy, whole)
    divided = VOCAB * WIDTH + 2 * (4 * WIDTH**2 + 4 * WIDTH**2 + 4 * WIDTH)
    assert held == 4 * (divided // 2 + 2 * 3 * WIDTH + 1) + 8 * 3


# ---------------------------------------------------------------- the functions
def adjoint(name):
    """<c, J t> = <J^T c, t>, both summed over the ranks, though every rank has its own."""
    axis = mesh(model=2).axis("model")
    g = torch.Generator().manual_seed(5 + axis.rank)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    tokens, targets = torch.tensor([[0, 3, 5]]), torch.tensor([[1, 4]])
    fn, args = {
        "column": (lambda x, w, b: tensor.column_parallel_linear(x, w, axis, b), (normal(2, 3), normal(4, 3), normal(4))),
        "column, by sequence": (
            lambda x, w: tensor.column_parallel_linear(x, w, axis, sequence_dim=0), (normal(2, 3), normal(4, 3))
        ),
        "row": (lambda x, w, b: tensor.row_parallel_linear(x, w, axis, b), (normal(2, 3), normal(4, 3), normal(4))),
        "row, by sequence": (lambda x, w: tensor.row_parallel_linear(x, w, axis, sequence_dim=0), (normal(2, 3), normal(4, 3))),
        "embedding": (lambda w: tensor.vocab_parallel_embedding(tokens, w, axis), (normal(3, 2),)),
        "cross entropy": (lambda x: tensor.vocab_parallel_cross_entropy(x, targets, axis), (normal(1, 2, 3),)),
        "attention": (
            lambda x, q, k, v, o: tensor.parallel_attention(x, q, k, v, o, axis, head_dim=2),
            (normal(1, 3, 4), normal(4, 4), normal(2, 4), normal(2, 4), normal(4, 4)),
        ),
    }[name]
    ts = tuple(normal(*x.shape) for x in args)
    out, pull = torch.func.vjp(fn, *args)
    c = normal(*out.shape)
    back = sum((a * b).sum() for a, b in zip(pull(c), ts, strict=True))
    step, size = 1e-6, lambda sign: tuple(x + sign * 1e-6 * t for x, t in zip(args, ts, strict=True))
    push = (fn(*size(1)) - fn(*size(-1))) / (2 * step)
    return psum(torch.stack(((c * push).sum(), back)), axis)


@pytest.mark.parametrize(
    "name", ["column", "column, by sequence", "row", "row, by sequence", "embedding", "cross entropy", "attention"]
)
def test_every_function_has_its_true_transpose(name):
    for push, back in ranks(2)(adjoint, name):
        torch.testing.assert_close(push, back, rtol=1e-6, atol=1e-8)        # differences of 1e-6: errors of 1e-10


@given(st.integers(1, 3), st.integers(1, 4), st.floats(0.1, 100))
@settings(max_examples=10)
def test_cross_entropy_is_torchs(half, rows, scale):
    logits, targets = drawn(rows, 2 * half) * scale, torch.arange(rows) % (2 * half)

    def run():
        axis = mesh(model=2).axis("model")
        x = logits.chunk(2, 1)[axis.rank].clone().requires_grad_()
        losses = tensor.vocab_parallel_cross_entropy(x, targets, axis)
        grad, = torch.autograd.grad(losses.sum() / 2, x)                    # both ranks' losses count
        return losses.detach(), all_gather(grad, axis, dim=1)

    x = logits.clone().requires_grad_()
    expected = F.cross_entropy(x, targets, reduction="none")
    grad, = torch.autograd.grad(expected.sum(), x)
    for got in ranks(2)(run):
        torch.testing.assert_close(got, (expected.detach(), grad), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- mistakes
def bare(specs=None, model=1, params=None, **kwargs):
    step = fs.step(lambda p, x, key: fs.mean(p["w"] * x), optim.sgd(0.1))
    return tensor_shard(step, mesh(data=1, model=model), specs or {"w": (M,)}, **kwargs).init(params or {"w": torch.ones(3, 2)})


@pytest.mark.parametrize("specs, error, match", [
    ({"w": ("modle",)}, ValueError, "'w' names axis 'modle', which mesh"),
    ({"w": (M, M)}, ValueError, "names an axis twice"),
    ({"w": (None, "data")}, ValueError, "no spec names axis 'model'"),
    ({"w": "model"}, TypeError, "must be a tuple of axis names and None"),
    ({"w": (M,), "v/*": (M,)}, ValueError, r"the spec for 'v/\*' names no leaf of params; there are 'w'"),
    ({"w": (M, None, None)}, ValueError, "of 'w' has 3 dims, the leaf has the shape"),
])
def test_bad_specs(specs, error, match):
    with pytest.raises(error, match=match):
        bare(specs)


def test_tied_leaves_have_one_spec():
    w = torch.ones(2, 2)
    with pytest.raises(ValueError, match="'a' and 'w' are one leaf"):
        bare({"w": (M,)}, params={"w": w, "a": w})


def test_sizes_that_do_not_divide():
    def run():
        with pytest.raises(ValueError, match=r"the 2 ranks of axis 'model' do not divide dim 0 of 'w', of shape \(3, 2\)"):
            bare(model=2)
        return True

    assert ranks(2)(run) == [True] * 2


def test_an_axis_is_used_once():
    step = tensor_shard(fs.step(lambda p, x, key: fs.mean(p["w"] * x), optim.sgd(0.1)), fs.mesh(model=1), {"w": (M,)})
    with pytest.raises(ValueError, match="axis 'model' is used by two transforms"):
        tensor_shard(step, fs.mesh(model=1), {"w": (M,)})


def test_inputs_that_do_not_fit():
    w = torch.ones(4, 4)
    with pytest.raises(ValueError, match="x has 3 features and the weight"):
        tensor.column_parallel_linear(torch.ones(1, 3), w, ONE)
    with pytest.raises(ValueError, match="query has 4 rows here, which are no whole heads of 3"):
        tensor.parallel_attention(torch.ones(1, 2, 4), w, w, w, w, ONE, head_dim=3)
    with pytest.raises(ValueError, match="logits and targets of shapes"):
        tensor.vocab_parallel_cross_entropy(torch.ones(2, 3), torch.ones(3, dtype=torch.int64), ONE)
