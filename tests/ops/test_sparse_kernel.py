"""The Triton kernels of block-sparse attention: values by the interpreter against dense attention in float64, and work lists."""
import pytest
import torch

from fspeed.ops.sparse.layout import Layout
from fspeed.ops.sparse.work import makespan, work_list

pytest.importorskip("triton")
from fspeed.ops.sparse.kernel import attention, gradients


def dense(q, k, v, layout, bias=None, padding=None, scale=1.0):
    group = q.shape[1] // k.shape[1]
    x = q @ k.repeat_interleave(group, 1).mT * scale + (0 if bias is None else bias)
    seen = layout.dense()[None] & (True if padding is None else padding[:, None, None, :])
    top = x.masked_fill(~seen, -1e30).amax(-1, keepdim=True).detach()
    p = torch.where(seen, (x - top).exp(), 0)
    return p / p.sum(-1, keepdim=True).clamp(min=1e-300) @ v.repeat_interleave(group, 1)


CASES = {
    "plain": dict(),
    "grouped, padded and biased": dict(group=2, padding=True, bias=True, D=7),
    "long rows": dict(N=(21, 333), whole=True),
    "bfloat16": dict(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    o = dict(group=1, padding=False, bias=False, D=16, N=(37, 53), whole=False, dtype=torch.float32) | CASES[case]
    torch.manual_seed(0)
    (Nq, Nk), heads = o["N"], 2
    layout = Layout.of_elements(torch.ones(Nq, Nk, dtype=torch.bool) if o["whole"] else torch.rand(Nq, Nk) < 0.4, 16).causal()
    q, k, v = (torch.randn(2, h, n, o["D"]).to(o["dtype"]) for h, n in ((heads, Nq), (heads // o["group"], Nk),
                                                                        (heads // o["group"], Nk)))
    bias = torch.randn(1, heads, 1, Nk) if o["bias"] else None
    padding = torch.rand(2, Nk) < 0.8 if o["padding"] else None
    grad = torch.randn(q.shape).to(o["dtype"])
    out, lse = attention(q, k, v, layout.rows, layout.masks, bias, padding, None, 0.3)
    got = [out, *gradients(grad, q, k, v, out, lse, layout.rows, layout.columns, layout.masks, bias, padding, None, 0.3)]
    wide = [x.double().requires_grad_() for x in (q, k, v, bias) if x is not None]
    want = dense(*wide[:3], layout, wide[3] if bias is not None else None, padding, 0.3)
    for a, b in zip(got, [want, *torch.autograd.grad(want, wide, grad.double())], strict=True):
        assert (a.double() - b).abs().max() <= 64 * torch.finfo(o["dtype"]).eps * b.abs().max().clamp(min=0.1)


@pytest.mark.parametrize("heads", [4, 8, 16, 32])
@pytest.mark.parametrize("tokens", [16384, 131072])
def test_work_is_balanced(heads, tokens):
    """One row that sees all and rows of six, as in BigBird: within 1.4 of an even share, on 132 multiprocessors."""
    size = torch.full((tokens // 128,), 6)
    size[0] = len(size)
    start = torch.cat([torch.zeros(1, dtype=torch.long), size.cumsum(0)])
    work = work_list(start, size, heads, 264)
    costs = (work.pieces[:, 3] - work.pieces[:, 1] + 1).repeat_interleave(heads).tolist()
    ideal = (int(size.sum()) + len(size)) * heads / 264
    assert makespan(costs, 264) <= 1.4 * ideal
    assert costs == sorted(costs, reverse=True)


def test_pieces_are_their_rows():
    size = torch.tensor([0, 40, 3, 0, 17])
    start = torch.cat([torch.zeros(1, dtype=torch.long), size.cumsum(0)])
    work = work_list(start, size // 2, 1, 2)
    found = sorted((row, at) for row, first, _, end, _ in work.pieces.tolist() for at in range(first, end))
    assert found == [(r, at) for r in range(5) for at in range(start[r], start[r + 1])]
    assert {row for row, *_ in work.pieces.tolist()} == set(range(5))
    places = sorted((row, place) for row, *_, place in work.pieces.tolist() if place >= 0)
    assert places == [(row, first + i) for row, first, count in work.splits.tolist() for i in range(count)]
