"""Cross entropy against PyTorch's, in every form; its memory, exactly; and cut over ranks."""
import pytest
import torch
from torch.nn.functional import cross_entropy as plain
from torch.nn.functional import linear

from fspeed.ops import xent
from fspeed.shard.collectives import pmax, psum
from fspeed.testing.count import allocated_peak
from fspeed.testing.ops import check_op
from fspeed.testing.pool import mesh, ranks
from tests.ops.rows_xent import ROWS

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
D, V = 6, 10
TARGETS = torch.tensor([0, 3, -100, 9, 5, 3, -100, 1])
OPTIONS = [(0., 0.), (0.1, 0.), (0., 0.01), (0.3, 0.02)]


def drawn(n=8):
    draw = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)
    return make(n, D), make(V, D), make(V)


def wanted(logits, targets, s=0., z=0.):
    lse = logits.logsumexp(-1)
    return plain(logits, targets, reduction="none", label_smoothing=s) + z * lse.square() * (targets != -100)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (9, 7, 41)])
def test_contract(row, shape):
    made, args = ROWS[row]
    check_op(made, *args(shape), second=shape != (9, 7, 41))


@pytest.mark.parametrize("options", OPTIONS)
def test_losses_and_gradients_are_pytorchs(options):
    s, z = options
    x, w, b = drawn()
    counts = torch.arange(8.).double()
    named = dict(label_smoothing=s, z_loss=z)
    forms = {
        "logits": lambda x, w, b: (xent.cross_entropy(linear(x, w, b), TARGETS, **named) * counts).sum(),
        "linear": lambda x, w, b: (xent.linear_cross_entropy(x, w, TARGETS, bias=b, chunk=3, **named) * counts).sum(),
        "sum": lambda x, w, b: xent.linear_cross_entropy_sum(x, w, TARGETS, counts, bias=b, chunk=3, **named),
    }
    of = lambda f: torch.func.grad_and_value(f, (0, 1, 2))(x, w, b)
    want = of(lambda x, w, b: (wanted(linear(x, w, b), TARGETS, s, z) * counts).sum())
    for f in forms.values():
        torch.testing.assert_close(of(f), want)


def test_a_sum_is_computed_twice_where_nobody_asked_in_forward():
    x, w, _ = drawn()
    out = lambda known: lambda x: xent.linear_sum(x, w, None, TARGETS.clamp(0), torch.ones(8).double(), 0.1, 0.01, 3, known)[0] * 3
    torch.testing.assert_close(torch.func.grad(out(False))(x), torch.func.grad(out(True))(x))


def test_targets_out_of_the_vocabulary_are_nan():
    assert xent.cross_entropy(torch.zeros(3, V), torch.tensor([V, -1, 0])).isnan().tolist() == [True, True, False]


def test_masked_vocabulary():
    logits = torch.zeros(1, 3).index_fill(1, torch.tensor(2), -torch.inf).requires_grad_()
    xent.cross_entropy(logits, torch.tensor([0])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0]]))


def test_what_does_not_fit_is_said():
    x, w, b = drawn()
    for wrong in (
        lambda: xent.cross_entropy(x, TARGETS[:3]), lambda: xent.cross_entropy(x, x[:, 0]),
        lambda: xent.cross_entropy(x, TARGETS, label_smoothing=2.), lambda: xent.linear_cross_entropy(x, w.T, TARGETS),
        lambda: xent.linear_cross_entropy(x, w, TARGETS, bias=b[1:]), lambda: xent.linear_cross_entropy(x, w.float(), TARGETS),
        lambda: xent.linear_cross_entropy_sum(x, w, TARGETS, torch.ones(3)),
    ):
        with pytest.raises(ValueError, match="cross_entropy"):
            wrong()


def test_memory_is_a_chunk_and_the_gradients_twice():
    x, w, t = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True), torch.randint(1000, (512,))
    peak = allocated_peak(lambda: xent.linear_cross_entropy_sum(x, w, t, chunk=16).backward())
    assert peak < 4 * (16 * 1000 + 2 * 9 * (1000 + 512) * 2)
    assert allocated_peak(lambda: plain(linear(x, w), t).backward()) > 4 * 3 * 512 * 1000


def on_a_rank(form, s, z):
    axis = mesh(vocab=2).axis("vocab")
    x, w, _ = drawn()
    start, end = ((0, 4), (4, V))[axis.rank]
    sums, most = (lambda v: psum(v, axis)), (lambda v: pmax(v, axis))

    def total(x, w):
        named = dict(label_smoothing=s, z_loss=z)
        if form == "logits":
            losses = xent.vocab_parallel_cross_entropy(linear(x, w), TARGETS, start, sums, most, **named)
        else:
            losses = xent.vocab_parallel_linear_cross_entropy(x, w, TARGETS, start, sums, most, chunk=3, **named)
        return (losses * torch.arange(8)).sum()

    (dx, dw), value = torch.func.grad_and_value(total, (0, 1))(x, w[start:end])
    return value, psum(dx, axis) / 2, dw / 2


@pytest.mark.parametrize("form", ["logits", "linear"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]])
def test_a_vocabulary_over_ranks(form, options):
    x, w, _ = drawn()
    want = lambda x, w: (wanted(linear(x, w), TARGETS, *options) * torch.arange(8)).sum()
    (dx, dw), value = torch.func.grad_and_value(want, (0, 1))(x, w)
    got = ranks(2)(on_a_rank, form, *options)
    for one in got:
        torch.testing.assert_close(one[:2], (value, dx))
    torch.testing.assert_close(torch.cat([one[2] for one in got]), dw)
