"""The norms' kernels compiled ahead of time, and on rows that are too long to stay in registers."""
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl

from fspeed.ops.aot import compiled
from fspeed.ops.norms.kernel import backward_kernel, forward_kernel
from fspeed.ops.rowwise import WHOLE, tile
from fspeed.testing.ops import check_op
from tests.ops.rows_norms import ROWS

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
TILES = sorted({tile(n) for n in (128, WHOLE, 65536)})
FLOATS = {name: "*fp32" for name in ("mean", "rstd", "dw", "db")}


@pytest.mark.parametrize("kernel", [forward_kernel, backward_kernel], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", TILES, ids=lambda cut: f"{cut.rows}x{cut.block}{'' if cut.whole else ' pieces'}")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_spills_and_wide_loads(kernel, dtype, cut, target):
    """With all that there can be: bias, residual, mean. Where rows are multiples of 16 numbers."""
    signature = {name: FLOATS.get(name, f"*{dtype}") for name in kernel.arg_names} | dict(M="i32", N="i32", eps="fp32")
    options = cut.options()
    warps = options.pop("num_warps")
    made = compiled(kernel, signature, dict(CENTER=True, WIDE=tl.float32, **options), target, num_warps=warps, divisible=["N"])
    assert made.spills == 0
    threads = warps * (64 if target == "gfx942" else 32)
    assert made.wide_loads >= 2 * (cut.rows * cut.block * (4 if dtype == "fp32" else 2) // 16 // threads)


@pytest.mark.parametrize("name", ["layer_norm with residual", "rms_norm with bias"])
def test_long_rows(monkeypatch, name):
    """In pieces, as rows of more than 8,192 numbers are: the last one short, several rows to a strip."""
    monkeypatch.setattr("fspeed.ops.rowwise.WHOLE", 64)
    monkeypatch.setattr("fspeed.ops.rowwise.LONG", 1024)
    monkeypatch.setattr("fspeed.ops.norms.kernel.STRIPS", 2)
    op, arguments = ROWS[name]
    torch.manual_seed(0)
    check_op(op, *arguments((5, 1500)), second=False)
