"""The norms in the contract table."""
import torch

from fspeed.ops.norms import ADD_NORM, NORM


def row(op, center, bias=False):
    xs = 2 if op is ADD_NORM else 1
    new = torch.randn
    return op, lambda shape: (
        *[new(shape) for _ in range(xs)], new(shape[-1:]), new(shape[-1:]) if bias else None, 1e-2, center)


ROWS = {
    "layer_norm": row(NORM, True, bias=True),
    "layer_norm without bias": row(NORM, True),
    "layer_norm with residual": row(ADD_NORM, True, bias=True),
    "rms_norm": row(NORM, False),
    "rms_norm with bias": row(NORM, False, bias=True),
    "rms_norm with residual": row(ADD_NORM, False),
}
