"""Softmax: masks of every broadcast, long rows, rows of which nothing counts, and its kernels compiled ahead of time."""
import importlib
from contextlib import nullcontext

import pytest
import torch

from fspeed.ops import softmax
from fspeed.ops.interpret import interpreted
from fspeed.testing.ops import check_op
from tests.ops.rows_softmax import ROWS

SHAPE = (3, 2, 5, 19)
MASKS = [(19,), (5, 1), (5, 19), (2, 1, 19), (2, 5, 19), (3, 1, 1, 19), (3, 1, 5, 19), (3, 2, 1, 1), (1, 2, 1, 19), (), SHAPE]
KERNELS = {"interpreted": interpreted, "cpu": nullcontext}


@pytest.mark.parametrize("within", KERNELS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_broadcast(shape, within):
    if within == "interpreted":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    x, mask = torch.randn(SHAPE), torch.rand(shape) < 0.6
    with KERNELS[within]():
        got = softmax(x, mask, 0.5)
    e = (x.double() * 0.5).exp() * mask
    torch.testing.assert_close(got.double(), e / e.sum(-1, keepdim=True).clamp(min=1e-300), rtol=1e-5, atol=1e-7)


def test_transposed_masks():
    pytest.importorskip("triton")
    x, mask = torch.randn(SHAPE), torch.rand(5, 3, 19, 2).permute(1, 3, 0, 2) < 0.5
    with interpreted():
        assert torch.allclose(softmax(x, mask), softmax(x, mask.contiguous()))
    torch.testing.assert_close(softmax(x, mask), softmax(x, mask.contiguous()))


def test_nothing_counts():
    """0, and finite gradients, also next to infinite scores."""
    x = torch.tensor([[1., 2.], [torch.inf, 3.]])
    mask = torch.tensor([[False, False], [False, True]])
    y, pull = torch.func.vjp(lambda x: softmax(x, mask), x)
    assert torch.equal(y, torch.tensor([[0., 0.], [0., 1.]]))
    assert torch.equal(pull(torch.ones(2, 2))[0], torch.zeros(2, 2))


@pytest.mark.parametrize("name", ROWS)
def test_long_rows(monkeypatch, name):
    """In pieces, as rows of more than 8,192 numbers are: the last one short."""
    pytest.importorskip("triton")
    monkeypatch.setattr("fspeed.ops.rowwise.WHOLE", 64)
    monkeypatch.setattr("fspeed.ops.rowwise.LONG", 1024)
    op, arguments = ROWS[name]
    torch.manual_seed(0)
    check_op(op, *arguments((5, 1500)), second=False)


def test_mistakes():
    with pytest.raises(ValueError, match="mask must be bool"):
        softmax(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"\(4, 2\) does not broadcast to x's shape \(2,\)"):
        softmax(torch.ones(2), torch.ones(4, 2, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [128, 8192, 65536])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_spills_and_wide_loads(name, dtype, n, target):
    """Where rows are multiples of 16 numbers."""
    tl = pytest.importorskip("triton.language")
    from fspeed.ops.aot import compiled
    from fspeed.ops.rowwise import tile
    function = getattr(importlib.import_module("fspeed.ops.softmaxes.kernel"), name)
    whole = ["N", "a_stride", "b_stride", "c_stride"]
    integers = [*whole, "M", "B", "C"]
    signature = {arg: f"*{dtype}" for arg in function.arg_names} | dict.fromkeys(integers, "i32") | {"scale": "fp32", "mask": "*u8"}
    options = tile(n).options()
    warps = options.pop("num_warps")
    constants = {"mask_stride": 1} if name == "forward_kernel" else {}
    got = compiled(function, signature, {**constants, "WIDE": tl.float32, **options}, target, num_warps=warps, divisible=whole)
    assert got.spills == 0
    threads = warps * (64 if target == "gfx942" else 32)
    assert got.wide_loads >= options["ROWS"] * options["BLOCK"] * (4 if dtype == "fp32" else 2) // 16 // threads
