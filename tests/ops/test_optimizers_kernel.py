"""Optimizers' kernels: compiled for GPUs ahead of time."""
import pytest

from fspeed.ops import aot

pytest.importorskip("triton")
from fspeed.ops.optimizers import kernel

INTEGERS = {"start": "i64", "n": "i64", "last": "i32"}
BUCKETS = {"adamw": ("p", "g", "mu", "nu", "to_p", "to_mu", "to_nu"), "lion": ("p", "g", "mu", "to_p", "to_mu"),
           "sgd": ("p", "g", "trace", "to_p", "to_trace")}


def compiled(name, target, types=None, **given):
    """A kernel with all buckets in float32 but those named; arguments that are given are constants."""
    kernel_ = getattr(kernel, f"{name}_kernel")
    kinds = {"numbers": "*fp32", "ends": "*i64", "decays": "*fp32", "key": "*i32", **INTEGERS}
    kinds |= dict.fromkeys(BUCKETS[name], "*fp32")
    constants = {"copy": None, "key": None,
                 "BLOCK": kernel.elements(target == "gfx942")} | ({"NESTEROV": True} if name == "sgd" else {}) | given
    constants = {k: v for k, v in constants.items() if k not in (types or {})}
    return aot.compiled(kernel_, kinds | (types or {}), constants, target, divisible=("n",), **kernel.CONFIG)


CONFIGURATIONS = {
    "float32": {}, "gradients in bf16": dict(types={"g": "*bf16"}),
    "bf16, by key": dict(types={"p": "*bf16", "to_p": "*bf16", "g": "*bf16", "key": "*i32"}),
    "copy in bf16": dict(types={"copy": "*bf16"}),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", BUCKETS)
def test_no_spills_and_wide_loads(name, configuration, target):
    found = compiled(name, target, **CONFIGURATIONS[configuration])
    buckets = len([b for b in BUCKETS[name] if not b.startswith("to_")])
    assert found.spills == 0, found
    assert found.wide_loads >= buckets, found
