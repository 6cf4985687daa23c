"""The activations' kernels, compiled ahead of time."""
import pytest

pytest.importorskip("triton")
import triton.language as tl

from fspeed.ops.activations.kernel import biased_backward_kernel, biased_kernel, gated_backward_kernel, gated_kernel
from fspeed.ops.aot import compiled
from fspeed.ops.rowwise import patch

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
KERNELS = [biased_kernel, biased_backward_kernel, gated_kernel, gated_backward_kernel]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_spills_and_wide_loads(kernel, dtype, kind, target):
    """Where rows are multiples of 16 numbers, and lie so apart."""
    names = kernel.arg_names
    whole = [name for name in names if name.endswith("stride") or name == "N"]
    signature = {name: f"*{dtype}" for name in names} | dict.fromkeys([*whole, "M"], "i32") | {"db": "*fp32"}
    cut = patch(4096)
    made = compiled(kernel, signature, dict(KIND=kind, WIDE=tl.float32, ROWS=cut.rows, BLOCK=cut.block), target,
                    num_warps=cut.num_warps, divisible=whole)
    assert made.spills == 0
    read = sum(name in ("x", "dy", "gate", "up") for name in names)
    threads = cut.num_warps * (64 if target == "gfx942" else 32)
    assert made.wide_loads >= read * cut.rows * cut.block * (4 if dtype == "fp32" else 2) // 16 // threads
