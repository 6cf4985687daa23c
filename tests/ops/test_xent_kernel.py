"""Cross entropy's kernels, compiled ahead of time."""
import pytest

pytest.importorskip("triton")

from fspeed.ops.aot import compiled
from fspeed.ops.xent.kernel import BLOCK, WARPS, backward, forward

NUMBERS = ("lse", "picked", "mean", "g_lse", "g_picked", "g_mean")


@pytest.mark.parametrize("kernel", [forward, backward])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_spills_and_wide_loads_wherever_a_row_starts(kernel, dtype, target):
    signature = {"logits": f"*{dtype}", "out": f"*{dtype}", "targets": "*i64", "stride": "i32", "out_stride": "i32", "width": "i32"}
    made = compiled(kernel, {**signature, **dict.fromkeys(NUMBERS, "*fp32")}, {"BLOCK": BLOCK}, target, num_warps=WARPS)
    assert made.spills == 0
    assert made.wide_loads >= BLOCK * (4 if dtype == "fp32" else 2) // 16 // (WARPS * (64 if target == "gfx942" else 32))
