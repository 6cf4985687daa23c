"""The norms in the contract table."""
import torch

from fspeed.ops.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM

new = torch.randn
ROWS = {
    "layer_norm": (LAYER_NORM, lambda shape: (new(shape), new(shape[-1:]), new(shape[-1:]), 1e-2)),
    "layer_norm without bias": (LAYER_NORM, lambda shape: (new(shape), new(shape[-1:]), None, 1e-2)),
    "rms_norm": (RMS_NORM, lambda shape: (new(shape), new(shape[-1:]), 1e-2)),
    "rms_norm with residual": (ADD_RMS_NORM, lambda shape: (new(shape), new(shape), new(shape[-1:]), 1e-2)),
}
