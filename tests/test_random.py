"""Random: jax's bits, by stored vectors and by jax itself; the same draws under any split, trace, batch of keys and derivative."""
import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fspeed import random
from fspeed._draws import unsigned_rem
from fspeed.ops.threefry import reference
from fspeed.random import Key

KEY = torch.tensor([-1640531527, 123456789], dtype=torch.int32)            # both words in use
LOGITS = [[0.0, 1.0, 2.0, -1.0], [3.0, 0.5, 0.0, 2.0]]
ROWS = torch.tensor([5, 0, 2**33, 9])
X64 = {"bits int64", "uniform float64", "randint int64"}

# name: (fspeed's, jax's, the bits of jax 0.10 from KEY); r is jax.random, k a key
DRAWS = {
    "split": (lambda k: random.split(k, 3), lambda r, k: r.key_data(r.split(k, 3)),
              [-292054620, 67245924, -1547056278, -1541799241, 511346896, 1975489490]),
    "split to a shape": (lambda k: random.split(k, (3, 1)), lambda r, k: r.key_data(r.split(k, (3, 1))),
                         [-292054620, 67245924, -1547056278, -1541799241, 511346896, 1975489490]),
    "fold_in": (lambda k: random.fold_in(k, 2**32 - 1), lambda r, k: r.key_data(r.fold_in(k, 2**32 - 1)),
                [1648250331, 1195257188]),
    "bits": (lambda k: random.bits(k, (2, 3)), lambda r, k: r.bits(k, (2, 3)),
             [-359297344, 131320285, 1808079618, 646401446, 880687274, 278425336]),
    "bits uint8": (lambda k: random.bits(k, (6,), torch.uint8), lambda r, k: r.bits(k, (6,), "uint8"),
                   [-64, -35, 2, -90, -86, -8]),
    "bits int16": (lambda k: random.bits(k, (6,), torch.int16), lambda r, k: r.bits(k, (6,), "uint16"),
                   [-28992, -13859, 6914, 19878, 14506, 28408]),
    "bits int64": (lambda k: random.bits(k, (3,), torch.int64), lambda r, k: r.bits(k, (3,), "uint64"),
                   [-1254365041478461596, -6644556116328316233, 2196218197206602706]),
    "uniform": (lambda k: random.uniform(k, (2, 3)), lambda r, k: r.uniform(k, (2, 3)),
                [1063949710, 1023047936, 1054313012, 1041898800, 1045559520, 1032110960]),
    "uniform float16": (lambda k: random.uniform(k, (6,), torch.float16), lambda r, k: r.uniform(k, (6,), "float16"),
                        [14454, 14926, 11968, 13528, 13072, 14060]),
    "uniform bfloat16": (lambda k: random.uniform(k, (6,), torch.bfloat16), lambda r, k: r.uniform(k, (6,), "bfloat16"),
                         [16192, 16220, 15360, 16166, 16170, 16248]),
    "uniform float64": (lambda k: random.uniform(k, (3,), torch.float64), lambda r, k: r.uniform(k, (3,), "float64"),
                        [4606569935869608002, 4603938006633841472, 4593243397996003216]),
    "uniform bounds": (lambda k: random.uniform(k, (6,), minval=-3.3, maxval=7.1),
                       lambda r, k: r.uniform(k, (6,), minval=-3.3, maxval=7.1),
                       [1086807045, -1069622946, 1066008813, -1075966654, -1080725590, -1071116984]),
    "normal bfloat16": (lambda k: random.normal(k, (6,), torch.bfloat16), lambda r, k: r.normal(k, (6,), "bfloat16"),
                        [16174, 16267, -16363, 16070, 16091, 16370]),
    "bernoulli": (lambda k: random.bernoulli(k, 0.3, (12,)), lambda r, k: r.bernoulli(k, 0.3, (12,)),
                  [0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0]),
    "randint": (lambda k: random.randint(k, (6,), -5, 1000), lambda r, k: r.randint(k, (6,), -5, 1000),
                [901, 269, 707, 327, 548, 558]),
    "randint uint8": (lambda k: random.randint(k, (6,), 0, 256, torch.uint8),
                      lambda r, k: r.randint(k, (6,), 0, 256, "uint8"), [42, 113, -64, 108, 111, 80]),
    "randint of a full range": (lambda k: random.randint(k, (6,), -2**31, 2**31 - 1),
                                lambda r, k: r.randint(k, (6,), -2**31, 2**31 - 1),
                                [-679372758, -118075023, 1581564608, 1267628652, 1203156079, 584932944]),
    "randint int64": (lambda k: random.randint(k, (3,), -3, 2**60, torch.int64),
                      lambda r, k: r.randint(k, (3,), -3, 2**60, "int64"),
                      [507629174782619127, 195711316227333871, 464726774508931104]),
    "permutation": (lambda k: random.permutation(k, 8), lambda r, k: r.permutation(k, 8), [0, 1, 5, 7, 4, 3, 2, 6]),
    "categorical": (lambda k: random.categorical(k, torch.tensor(LOGITS), shape=(3, 2)),
                    lambda r, k: r.categorical(k, np.array(LOGITS, "float32"), shape=(3, 2)), [0, 0, 2, 0, 2, 0]),
}
# what else is drawn, and held to the same laws without vectors of its own
MORE = {
    "fold_in a tensor": lambda k: random.fold_in(k, torch.full((), 7)),
    "normal": lambda k: random.normal(k, (5,)),
    "uniform between tensors": lambda k: random.uniform(k, (2, 3), minval=torch.zeros(3), maxval=torch.full((2, 1), 2.0)),
    "nothing": lambda k: random.uniform(k, (0, 3)),
    "permutation of columns": lambda k: random.permutation(k, torch.arange(12).view(3, 4), 1),
    "permutation of each row": lambda k: random.permutation(k, torch.arange(12).view(3, 4), 1, independent=True),
    "uniform_rows": lambda k: random.uniform_rows(Key(k, rows()), (3,)),
    "uniform_rows bfloat16": lambda k: random.uniform_rows(Key(k, rows()), (3,), torch.bfloat16),
    "normal_rows": lambda k: random.normal_rows(Key(k, rows()), 3),
    "dropout": lambda k: random.dropout(Key(k, rows()), torch.ones(4, 5), 0.4),
    "dropout by a raw key": lambda k: random.dropout(k, torch.ones(4, 5), 0.4),
    "split and fold_in of a Key": lambda k: Key(k, rows()).split(3)[1].fold_in(4).data,
}
ALL = {name: ours for name, (ours, _, _) in DRAWS.items()} | MORE


def rows():
    return torch.arange(4) * 2**31 + 7


def patterns(x):
    """The bits of x as integers; those of integers as they are."""
    if x.is_floating_point():
        return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
    return x.view(torch.int8) if x.dtype == torch.uint8 else x


def ulps(x, y):
    """How many float32 numbers lie between x and y."""
    order = [np.where(p >= 0, p, -2**31 - p) for p in (np.asarray(v, np.float32).view(np.int32).astype(np.int64) for v in (x, y))]
    return np.abs(order[0] - order[1])


@pytest.mark.parametrize("name", DRAWS)
def test_stored_vectors(name):
    ours, _, stored = DRAWS[name]
    assert patterns(ours(KEY)).flatten().tolist() == stored


def test_stored_normal():
    stored = torch.tensor([1068548406, -1074812171, -1102303594, -1081842848, -1085088017, -1077806304], dtype=torch.int32)
    assert ulps(random.normal(KEY, (6,)), stored.view(torch.float32)).max() <= 3
    tail = torch.tensor([-1066412369, -1066524584], dtype=torch.int32)                     # torch.erfinv is 82 and 53 off
    assert ulps(random.normal(KEY, (20_000,))[[9850, 13340]], tail.view(torch.float32)).max() <= 3
    wide = torch.tensor([4609393050992954958, 4600119308528851679, -4615380263474416129]).view(torch.float64)
    torch.testing.assert_close(random.normal(KEY, (3,), torch.float64), wide, rtol=1e-12, atol=0)    # another approximation


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax")


def same_bits(ours, theirs):
    theirs = np.asarray(theirs)
    if theirs.dtype.kind in "ib":                                          # values: index dtypes differ
        return np.array_equal(ours.numpy(), theirs)
    signed = theirs.view({1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[theirs.dtype.itemsize])
    return np.array_equal(patterns(ours).numpy(), signed)


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("x64", [False, True])
def test_bits_are_jax(jax, x64):
    names = [name for name in DRAWS if (name in X64) == x64]

    @jax.jit
    def theirs(seed, data):
        k = jax.random.fold_in(jax.random.key(seed), data)
        return {name: DRAWS[name][1](jax.random, k) for name in names}

    @settings(max_examples=30)
    @given(seeds, seeds)
    def check(seed, data):
        with jax.enable_x64(True) if x64 else contextlib.nullcontext():
            expected = theirs(np.uint32(seed), np.uint32(data))
        k = random.fold_in(random.key(seed), data)
        assert not [name for name in names if not same_bits(DRAWS[name][0](k), expected[name])]

    check()


@pytest.mark.parametrize("dtype, shape", [
    ("float32", ()), ("float32", (17,)), ("float32", (9, 7, 41)), ("float32", (2, 0)), ("float16", (781,)), ("bfloat16", (781,)),
], ids=str)
def test_uniform_and_normal_are_jax_in_any_shape_and_bounds(jax, dtype, shape):
    @settings(max_examples=5)
    @given(seeds, st.floats(-1e3, 1e3, width=16), st.floats(-1e3, 1e3, width=16))
    def check(seed, low, high):
        k, theirs = random.key(seed), jax.random.key(seed)
        bounds = (min(low, high) + 0.0, max(low, high) + 0.0)              # -0.0 to 0.0: XLA's zeros have another sign
        ours = random.uniform(k, shape, getattr(torch, dtype), *bounds)
        expected = jax.random.uniform(theirs, shape, dtype, *bounds)
        if dtype == "float16":          # XLA rounds u (maxval - minval) + minval once where a CPU has such arithmetic
            wide = np.float32(ours.float()) - np.asarray(expected, np.float32)
            assert abs(wide).max(initial=0) <= 2**-10 * max(abs(bounds[0]), abs(bounds[1]), bounds[1] - bounds[0])
            assert same_bits(random.uniform(k, shape, torch.float16), jax.random.uniform(theirs, shape, dtype))
        else:
            assert same_bits(ours, expected)
        ours, theirs = random.normal(k, shape, getattr(torch, dtype)), jax.random.normal(theirs, shape, dtype)
        assert ulps(ours, theirs).max(initial=0) <= 3 if dtype == "float32" else same_bits(ours, theirs)

    check()


@settings(max_examples=25)
@given(seeds, st.integers(-2**31, 2**31 - 1), st.integers(-2**31, 2**31 - 1), st.sampled_from(["int8", "uint8", "int16", "int32"]))
def test_randint_is_jax_in_any_range(seed, low, high, dtype):
    jax = pytest.importorskip("jax")
    ours = random.randint(random.key(seed), (5,), low, high, getattr(torch, dtype))
    assert same_bits(ours.int(), jax.random.randint(jax.random.key(seed), (5,), low, high, dtype).astype("int32"))


@given(st.integers(-2**63, 2**63 - 1), st.integers(1, 2**63 - 1))
def test_unsigned_rem(a, b):
    assert unsigned_rem(torch.tensor(a), torch.tensor(b)).item() == a % 2**64 % b


@pytest.mark.parametrize("n", [0, 1, 17, 2000])                            # 2000: sorted twice, since bits may be equal
def test_permutation_is_jax(jax, n):
    for seed in range(3):
        assert same_bits(random.permutation(random.key(seed), n), jax.random.permutation(jax.random.key(seed), n))


@pytest.mark.parametrize("axis, independent", [(0, False), (1, True), (-1, False)])
def test_permutation_of_an_array_is_jax(jax, axis, independent):
    x = np.arange(9 * 7 * 41).reshape(9, 7, 41)
    ours = random.permutation(random.key(1), torch.from_numpy(x), axis, independent)
    assert same_bits(ours, jax.random.permutation(jax.random.key(1), x, axis, independent))


@pytest.mark.parametrize("dtype, logits, axis, shape", [
    ("float32", (2, 3, 4), -2, None), ("float32", (2, 3, 4), 0, (7, 3, 4)), ("float32", (4,), 0, ()), ("float32", (1, 4), -1, (5,)),
    ("bfloat16", (4,), -1, (781,)),                                        # of 7 bits: u is 0 often
], ids=str)
def test_categorical_is_jax(jax, dtype, logits, axis, shape):
    logits = 4 * torch.randn(logits, generator=torch.Generator().manual_seed(0))
    for seed in range(3):
        theirs = jax.random.categorical(jax.random.key(seed), jax.numpy.asarray(logits.numpy(), dtype), axis, shape)
        assert same_bits(random.categorical(random.key(seed), logits.to(getattr(torch, dtype)), axis, shape), theirs)


@settings(max_examples=30)
@given(seeds, seeds, st.integers(-2**63, 2**63 - 1))
def test_64_bit_counters_are_jax(seed, data, count):
    threefry = pytest.importorskip("jax.extend.random").threefry2x32_p
    k = random.fold_in(random.key(seed), data)
    upper, lower = np.array([[count >> 32 & 0xFFFFFFFF], [count & 0xFFFFFFFF]], np.uint32)
    theirs = np.asarray(threefry.bind(*k.numpy().view(np.uint32), upper, lower))
    assert random.uniform_rows(Key(k, torch.tensor([count]))).item() == int(theirs[0, 0] ^ theirs[1, 0]) // 2**9 / 2**23


@given(seeds, st.integers(-2**31, -1))
def test_key_is_jax(seed, negative):
    jax = pytest.importorskip("jax")
    for s in (seed, negative):
        assert same_bits(random.key(s), jax.random.key_data(jax.random.key(s)))


@given(st.integers(2**32, 2**63 - 1))
def test_a_long_seed_keeps_both_words(seed):
    assert random.key(seed).tolist() == [v - (v >> 31 << 32) for v in (seed >> 32, seed & 0xFFFFFFFF)]
    assert not torch.equal(random.key(seed), random.key(seed & 0xFFFFFFFF))


# Draws by row


@settings(max_examples=40)
@given(seeds, st.integers(1, 9), st.sampled_from([(), (1,), (3, 5), (0,), (130,)]), st.randoms(use_true_random=False))
def test_rows_are_those_of_the_whole_batch(seed, n, shape, order):
    """However the batch is divided and ordered, down to parts without a row."""
    k = random.key(seed)
    rows = torch.tensor(order.sample(range(n), n))
    cuts = sorted(order.choices(range(n + 1), k=2))
    x = torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed)) + 1
    for draw, whole in (
        (lambda key, part: random.uniform_rows(key, shape), random.uniform(k, (n, *shape))),
        (lambda key, part: random.uniform_rows(key, shape, torch.float64), random.uniform(k, (n, *shape), torch.float64)),
        (lambda key, part: random.normal_rows(key, shape), random.normal(k, (n, *shape))),
        (lambda key, part: random.dropout(key, x[part], 0.3), random.dropout(k, x, 0.3)),
    ):
        parts = torch.cat([draw(Key(k, part), part) for part in rows.tensor_split(cuts)])
        assert torch.equal(parts, whole[rows])


def test_rows_count_in_64_bits():
    n, row = 100, 2**40 + 3
    got = random.uniform_rows(Key(KEY, torch.tensor([row])), (n,))[0]
    assert torch.equal(got, reference.uniform(KEY, row * n, n))
    assert not torch.equal(got, random.uniform_rows(Key(KEY, torch.tensor([3])), (n,))[0])


def test_a_key_with_rows():
    key = Key(KEY, ROWS)
    for got, want in ((key.fold_in(3), random.fold_in(KEY, 3)), *zip(key.split(3), random.split(KEY, 3), strict=True)):
        assert torch.equal(got.data, want) and got.rows is ROWS
    assert torch.equal(random.uniform(key, (5,)), random.uniform(KEY, (5,)))           # without rows: every rank the same
    leaves, spec = torch.utils._pytree.tree_flatten(key)
    assert leaves[0] is KEY and leaves[1] is ROWS and isinstance(torch.utils._pytree.tree_unflatten(leaves, spec), Key)


@given(seeds, st.integers(-2**63, 2**63 - 1))
def test_folding_in_a_tensor_takes_its_low_32_bits(seed, data):
    k = random.key(seed)
    assert torch.equal(random.fold_in(k, torch.tensor(data)), random.fold_in(k, data % 2**32))


# Transforms


@pytest.mark.parametrize("name", ALL)
def test_vmap_over_keys(name):
    keys = random.split(KEY, 3)
    torch.testing.assert_close(torch.vmap(ALL[name])(keys), torch.stack([ALL[name](k) for k in keys]), rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_traced(name):
    """A graph traced with one key draws with another as eager does: nothing was read from the key."""
    graph = make_fx(lambda k: ALL[name](k), tracing_mode="symbolic")(random.key(8))
    torch.testing.assert_close(graph(KEY), ALL[name](KEY), rtol=0, atol=0)


def test_traced_by_functionalize():
    graph = make_fx(torch.func.functionalize(ALL["dropout"]))(random.key(8))
    torch.testing.assert_close(graph(KEY), ALL["dropout"](KEY), rtol=0, atol=0)


@pytest.mark.parametrize("draw", [random.normal, lambda k, shape: random.uniform(k, shape, minval=-3.0, maxval=0.1)])
def test_blocks_change_nothing(draw):
    """More than 2**16 draws are finished in blocks, but not in a graph."""
    shape = (5, 2**17 + 11)
    graph = make_fx(lambda k: draw(k, shape))(random.key(8))
    assert len(graph.graph.nodes) < 250
    torch.testing.assert_close(graph(KEY), draw(KEY, shape), rtol=0, atol=0)


def test_vmap_over_data_and_over_rows():
    x, rows = torch.ones(3, 4, 5), torch.arange(12).view(3, 4)
    same = torch.vmap(lambda x: random.dropout(Key(KEY, ROWS), x, 0.5))(x)
    assert torch.equal(same, random.dropout(Key(KEY, ROWS), x[0], 0.5).expand(3, 4, 5))
    each = torch.vmap(lambda x, rows: random.dropout(Key(KEY, rows), x, 0.5))(x, rows)
    assert torch.equal(each.view(12, 5), random.dropout(KEY, x.view(12, 5), 0.5))
    tree = torch.vmap(lambda key, x: random.dropout(key, x, 0.5), in_dims=(Key(None, 0), 0))(Key(KEY, rows), x)
    assert torch.equal(tree, each)


# Dropout


def mask(x):
    return random.bernoulli(KEY, 0.7, x.shape)


def test_dropout_is_flax():
    x = random.normal(random.key(1), (17, 63))
    assert torch.equal(random.dropout(KEY, x, 1 - 0.7), torch.where(mask(x), x / 0.7, 0))


def test_dropout_at_its_ends():
    x = torch.tensor([[1.0, float("inf"), float("nan")]], requires_grad=True)
    assert random.dropout(KEY, x, 0) is x and random.dropout(None, x, 0.5) is x
    none = random.dropout(KEY, x, 1)
    assert none.tolist() == [[0, 0, 0]]
    assert torch.autograd.grad(none.sum(), x)[0].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_dropout_keeps_the_dtype_and_drops_alike(dtype):
    x = torch.ones(9, 63, dtype=dtype)
    out = random.dropout(KEY, x, 0.5)
    assert out.dtype == dtype and torch.equal(out != 0, random.bernoulli(KEY, 0.5, x.shape))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")           # torch's, in its first jvp
@pytest.mark.parametrize("key", [KEY, Key(KEY, ROWS)], ids=["raw", "rows"])
def test_dropout_differentiates(key):
    x = random.normal(random.key(1), (4, 5), torch.float64)
    drop = lambda x: random.dropout(key, x, 0.3)
    scale = drop(torch.ones_like(x))
    assert 0 < scale.count_nonzero() < scale.numel()
    dense = torch.diag(scale.flatten()).view(4, 5, 4, 5)
    torch.testing.assert_close(torch.func.jacrev(drop)(x), dense)
    torch.testing.assert_close(torch.func.jacfwd(drop)(x), dense)
    hessian = torch.func.hessian(lambda x: (drop(x) ** 3).sum())(x)
    torch.testing.assert_close(hessian.view(20, 20), torch.diag((6 * scale**3 * x).flatten()))
    leaf = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(drop, leaf, check_forward_ad=True) and torch.autograd.gradgradcheck(drop, leaf)


def test_dropout_differentiates_under_vmap_and_in_a_graph():
    x = random.normal(random.key(1), (3, 4, 5))
    keys = random.split(KEY, 3)
    loss = lambda x, k: (random.dropout(k, x, 0.3) ** 2).sum()
    want = torch.stack([2 * a * random.dropout(k, torch.ones_like(a), 0.3) ** 2 for a, k in zip(x, keys, strict=True)])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x, keys), want)
    graph = make_fx(torch.func.grad(loss))(x[1], keys[1])
    torch.testing.assert_close(graph(x[0], keys[0]), want[0])


def test_bounds_differentiate():
    low, high = torch.tensor(-1.0), torch.tensor([2.0, 3.0])
    u = random.uniform(KEY, (2,))
    d_low, d_high = torch.func.jacrev(lambda low, high: random.uniform(KEY, (2,), torch.float32, low, high), (0, 1))(low, high)
    torch.testing.assert_close((d_low, d_high), (1 - u, torch.diag(u)))


# Statistics, at five standard deviations or more


def test_statistics():
    n = 200_000
    u, z = random.uniform(KEY, (n,)), random.normal(KEY, (n,))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 5 * (1 / 12 / n) ** 0.5 and abs(u.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    assert abs(z.mean()) < 5 / n**0.5 and abs(z.var() - 1) < 5 * (2 / n) ** 0.5
    rows = torch.stack([u.view(2, -1)[0], u.view(2, -1)[1], random.uniform(random.fold_in(KEY, 1), (n // 2,))])
    assert (torch.corrcoef(rows) - torch.eye(3)).abs().max() < 5 / (n / 2) ** 0.5
    counts = torch.bincount(random.randint(KEY, (n,), 0, 10)) + torch.bincount(random.categorical(KEY, torch.zeros(10), shape=(n,)))
    assert ((counts - n / 5) ** 2 / (n / 5)).sum() < 40
    assert abs((random.dropout(KEY, torch.ones(n), 0.1) != 0).float().mean() - 0.9) < 5 * (0.09 / n) ** 0.5


# Errors


@pytest.mark.parametrize("call, error, says", [
    (lambda: random.uniform(torch.zeros(2)), TypeError, r"int32 tensor of shape \(2,\).*got torch.float32 of shape \(2,\)"),
    (lambda: random.uniform(random.split(KEY)), TypeError, r"got torch.int32 of shape \(2, 2\).*vmap"),
    (lambda: random.bits(7), TypeError, "got 7"),
    (lambda: random.uniform(KEY, (), torch.int32), TypeError, "got torch.int32"),
    (lambda: random.bits(KEY, (), torch.float32), TypeError, "got torch.float32"),
    (lambda: random.randint(KEY, (), 0, 2, torch.float32), TypeError, "got torch.float32"),
    (lambda: random.key(2**64), ValueError, "at most 64 bits"),
    (lambda: random.fold_in(KEY, -1), ValueError, "got -1"),
    (lambda: random.fold_in(KEY, 2**32), ValueError, "got 4294967296"),
    (lambda: random.fold_in(KEY, torch.zeros(2, dtype=torch.int64)), TypeError, r"shape \(2,\)"),
    (lambda: random.fold_in(KEY, torch.tensor(1.0)), TypeError, "got torch.float32"),
    (lambda: random.uniform_rows(KEY), TypeError, "got a raw key"),
    (lambda: random.dropout(KEY, torch.ones(2), 1.1), ValueError, "got 1.1"),
    (lambda: random.dropout(KEY, torch.ones(2), -0.1), ValueError, "got -0.1"),
    (lambda: random.dropout(None, torch.ones(2), float("nan")), ValueError, "got nan"),
    (lambda: random.dropout(Key(KEY, ROWS), torch.ones(8, 3), 0.5), ValueError, r"4 rows.*\(8, 3\).*Reshape x, or pass key.data"),
    (lambda: random.dropout(Key(KEY, ROWS), torch.tensor(1.0), 0.5), ValueError, r"4 rows.*\(\)"),
])
def test_errors_say_what_came_and_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()
