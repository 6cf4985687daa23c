"""Block-sparse attention against dense masked attention; its draws, its memory, and its way through transforms and trees."""
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fspeed as fs
from fspeed.ops import Layout, sparse_attention
from fspeed.ops.sparse import bigbird, chunks, cpu, sliding_window, stack
from fspeed.ops.sparse import layout as layouts
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing.count import allocated_peak
from fspeed.testing.ops import check_op
from tests.ops.rows_sparse import ROWS

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}      # a few roundings


def dense(q, k, v, layout, causal=False, bias=None, key_padding=None, scale=None, dropout=0., key=None):
    """The same in float64, with all of the scores."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + (0 if bias is None else bias.double())
    seen = layout.dense()[None].expand(x.shape)
    if causal:
        seen = seen & torch.ones_like(seen[0, 0]).tril(k.shape[2] - q.shape[2])
    if key_padding is not None:
        seen = seen & key_padding[:, None, None, :]
    empty = ~seen.any(-1, keepdim=True)
    p = x.masked_fill(~seen & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0)
    return fs.random.dropout(key, p, dropout) @ v


@st.composite
def calls(draw):
    """Arguments of a call."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    D, group, groups, batch = (draw(st.sampled_from(s)) for s in ([1, 8, 40, 256], [1, 2], [1, 3], [1, 2]))
    Nq, Nk = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    heads, block = group * groups, draw(st.sampled_from([16, 32]))
    shape = draw(st.sampled_from([(Nq, Nk), (heads, Nq, Nk)]))
    layout = Layout.of_elements(torch.rand(shape) < draw(st.sampled_from([0.02, 0.5, 1.])), block)
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    q, k, v = (torch.randn(batch, h, n, D).to(dtype) for h, n in ((heads, Nq), (groups, Nk), (groups, Nk)))
    biased = draw(st.sampled_from([None, (Nq, Nk), (1, heads, 1, Nk), (batch, 1, Nq, 1), (1,)]))
    return q, k, v, layout, dict(
        causal=draw(st.booleans()), scale=draw(st.sampled_from([None, 0.2, -0.5])),
        bias=None if biased is None else torch.randn(biased).to(dtype),
        key_padding=torch.rand(batch, Nk) < 0.7 if draw(st.booleans()) else None,
        **draw(st.sampled_from([{}, dict(dropout=0.3, key=fs.random.key(3))])))


@settings(max_examples=60)
@given(calls(), st.sampled_from([1 << 9, 1 << 17]))
def test_values_and_gradients_are_those_of_dense_attention(call, scores):
    q, k, v, layout, named = call
    inputs = [x for x in (q, k, v, named["bias"]) if x is not None]
    with mock.patch.object(chunks, "SCORES", scores):               # a row in several pieces, or several rows in one chunk
        of = lambda f: lambda q, k, v, *bias: f(q, k, v, layout, **{**named, **dict(zip(["bias"], bias, strict=False))})
        got, pull = torch.func.vjp(of(sparse_attention), *inputs)
        grad = torch.randn_like(got)
        want, pull_dense = torch.func.vjp(of(dense), *[x.double() for x in inputs])
        rows = q[..., 0].numel()
        D = q.shape[-1]             # a gradient has the roundings of D products of output and its gradient, from each row
        added = [1, D, *[D * max(1, rows / x.shape[:-1].numel()) for x in (k, v)], *[D * rows / x.numel() for x in inputs[3:]]]
        for a, b, n in zip([got, *pull(grad)], [want, *pull_dense(grad.double())], added, strict=True):
            assert a.shape == b.shape and a.dtype == q.dtype
            near = TOLERANCE[q.dtype] * max(1, n) ** 0.5
            off, size = (a.double() - b).abs().max().item(), max(1, b.abs().max().item())
            assert off <= near * size, f"{off} of {size}, {tuple(a.shape)} {n}"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", [(1,), (17,), (2, 1, 41)])
def test_contract(row, shape):
    made, args = ROWS[row]
    check_op(made, *args(shape), second=shape != (2, 1, 41))


def test_rows_that_see_nothing():
    layout = Layout.of(torch.tensor([[True, False], [False, False]]), 16, (20, 20))
    q, k, v = (torch.randn(1, 1, 20, 4).requires_grad_() for _ in range(3))
    out = sparse_attention(q, k, v, layout)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out[..., 16:, :].eq(0).all() and grads[0][..., 16:, :].eq(0).all() and all(g.isfinite().all() for g in grads)
    assert grads[2][..., 16:, :].eq(0).all() and grads[2][..., :16, :].ne(0).all()


@pytest.mark.parametrize("Nq, Nk", [(50, 50), (33, 70), (70, 33)])
def test_the_future_is_not_seen(Nq, Nk):
    """Bit for bit, however wild it is."""
    layout = bigbird((Nq, Nk), 16, random=2)
    q, k, v = torch.randn(1, 2, Nq, 8), torch.randn(1, 2, Nk, 8), torch.randn(1, 2, Nk, 8)
    out = sparse_attention(q, k, v, layout, causal=True)
    for i in range(0, Nq, 7):
        later = (torch.arange(Nk) > i + Nk - Nq)[:, None]
        other = sparse_attention(q, k.masked_fill(later, 1e30), v.masked_fill(later, 1e30), layout, causal=True)
        assert torch.equal(out[:, :, : i + 1], other[:, :, : i + 1])


def test_dropout_does_not_depend_on_how_a_batch_is_split():
    layout, rows = sliding_window(40, 16), torch.tensor([5, 0, 7])
    q, k, v = torch.randn(3, 3, 2, 40, 8)
    run = lambda some: sparse_attention(
        q[some], k[some], v[some], layout, dropout=0.4, key=fs.random.Key(fs.random.key(1), rows[some]))
    torch.testing.assert_close(run(slice(3)), torch.cat([run(slice(2)), run(slice(2, 3))]))
    torch.testing.assert_close(
        run(slice(3)), dense(q, k, v, layout, dropout=0.4, key=fs.random.Key(fs.random.key(1), rows)).float())
    assert torch.equal(sparse_attention(q, k, v, layout, dropout=0.4), sparse_attention(q, k, v, layout))


def test_memory_is_linear_in_64k_tokens():
    """What comes out and a chunk; in backward a gradient each, a number a query, and no more: scores would be 17 GB."""
    N, D = 1 << 16, 16
    layout = bigbird(N, 64, random=2)
    q, k, v = (torch.randn(1, 1, N, D, requires_grad=True) for _ in range(3))
    out = sparse_attention(q, k, v, layout)                         # the chunks are made once
    one, chunk = 4 * N * D, 4 * (2 * chunks.SCORES + 8 * chunks.SCORES * D // 64)
    assert allocated_peak(lambda: sparse_attention(q, k, v, layout)) < 2.5 * one + chunk
    assert allocated_peak(lambda: torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True)) < 5 * one + chunk


def test_what_is_made_of_a_layout_is_made_once():
    layout = bigbird(200, 16)
    q, k, v = (torch.randn(1, 1, 200, 8, requires_grad=True) for _ in range(3))
    with mock.patch.object(chunks, "cut", wraps=chunks.cut) as cut, mock.patch.object(layouts, "make", wraps=layouts.make) as make:
        for _ in range(3):
            sparse_attention(q, k, v, layout, causal=True).sum().backward()
    assert (cut.call_count, make.call_count) == (1, 1)
    before = len(layouts._KNOWN)
    del layout
    assert len(layouts._KNOWN) == before - 1


def test_batches_by_vmap_are_one_call():
    layout = bigbird(70, 16)
    q, k, v, bias = torch.randn(4, 2, 2, 70, 8), torch.randn(2, 4, 1, 70, 8), torch.randn(2, 1, 70, 8), torch.randn(4, 70)
    f = lambda q, k, v, bias: sparse_attention(q, k, v, layout, bias=bias)
    with mock.patch.object(cpu, "attention", wraps=cpu.attention) as calls:
        got = torch.vmap(f, (0, 1, None, 0))(q, k, v, bias)
        assert calls.call_count == 1
    torch.testing.assert_close(got, torch.stack([f(q[i], k[:, i], v, bias[i]) for i in range(4)]))

    loss = lambda *xs: f(*xs).square().sum()
    with mock.patch.object(cpu, "gradients", wraps=cpu.gradients) as calls:
        got = torch.vmap(torch.func.grad(loss, (0, 2, 3)), (0, 1, None, 0))(q, k, v, bias)
        assert calls.call_count == 1
    for i in range(4):
        want = torch.func.grad(loss, (0, 2, 3))(q[i], k[:, i], v, bias[i])
        torch.testing.assert_close([g[i] for g in got], list(want))


def test_a_layout_is_a_tree():
    layout = stack([sliding_window(40, 16), bigbird(40, 16, causal=True)])
    moved = tree_map(lambda x: x.clone(), layout)
    assert isinstance(moved, Layout) and (moved.block, moved.heads, moved.lengths) == (16, 2, (40, 40))
    assert torch.equal(moved.dense(), layout.dense()) and len(tree_leaves(layout)) == 9
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    graph = make_fx(lambda q, k, v: sparse_attention(q, k, v, moved), tracing_mode="fake", _allow_non_fake_inputs=True)(q, k, v)
    assert next(n.target.name() for n in graph.graph.nodes if n.op == "call_function") == "fspeed::sparse_attention"
    torch.testing.assert_close(graph(q, k, v), dense(q, k, v, layout).float())


@pytest.mark.parametrize("inside", ["closed over", "a parameter"])
def test_steps_train_under_a_layout(inside):
    made = bigbird(40, 16)

    def loss(params, x, key):
        layout = params.get("layout", made)
        q, k, v = (x @ params["w"]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return fs.mean(sparse_attention(q, k, v, layout, causal=True, dropout=0.2, key=key).square())

    params = {"w": torch.randn(8, 24)} | ({"layout": made} if inside == "a parameter" else {})
    x, states = torch.randn(3, 40, 8), []
    for transform in (lambda step: step, fs.jit):
        step = transform(fs.step(loss, fs.optim.sgd(0.1)))
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, x)
        states.append(step.params(state)["w"])
    torch.testing.assert_close(*states)
    assert not torch.equal(states[0], params["w"])


def test_what_does_not_fit_is_said():
    layout, (q, k, v) = sliding_window(40, 16), torch.randn(3, 2, 2, 40, 8)
    for words, args, named in (
        ("expected a multiple", (q, k[:, :0], v[:, :0], layout), {}), ("k's and v's alike", (q, k, v[..., :4], layout), {}),
        ("of these lengths", (q[:, :, :30], k, v, layout), {}), ("expected 1 or 2", (q, k, v, stack([layout] * 3)), {}),
        ("one floating dtype", (q, k, v.double(), layout), {}), ("broadcast", (q, k, v, layout), dict(bias=torch.ones(41))),
        ("key_padding", (q, k, v, layout), dict(bias=torch.ones(40, dtype=torch.bool))),
        ("expected bool", (q, k, v, layout), dict(key_padding=torch.ones(2, 40))),
        ("dropout is 2", (q, k, v, layout), dict(dropout=2.)),
        ("2 rows", (q, k, v, layout), dict(dropout=.5, key=fs.random.Key(fs.random.key(0), torch.arange(3)))),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            sparse_attention(*args, **named)
