"""The activations in the contract table."""
import torch

from fspeed.ops.activations import BIASED, GATED, HALVES

new = torch.randn
ROWS = {
    "bias_gelu": (BIASED, lambda shape: (2 * new(shape), new(shape[-1:]), "gelu")),
    "bias_gelu, tanh": (BIASED, lambda shape: (2 * new(shape), new(shape[-1:]), "gelu_tanh")),
    "swiglu": (GATED, lambda shape: (2 * new(shape), new(shape), "silu")),
    "geglu of halves": (HALVES, lambda shape: (new(*shape[:-1], 2 * shape[-1]), "gelu")),
}
