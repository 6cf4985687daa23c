"""Bias, dropout and residual in the contract table: by a raw key, and by a key's rows."""
import torch

from fspeed import random
from fspeed.ops.dropouts import BIAS_DROPOUT_RESIDUAL, counters

new = torch.randn


def row(bias, by_rows, keep=0.7):
    def arguments(shape):
        x, key = new(shape), random.key(1 << 40)
        key = random.Key(key, torch.randperm(shape[0]) << 30) if by_rows else key
        return x, new(shape[-1:]) if bias else None, new(shape), *counters(key, x), keep

    return BIAS_DROPOUT_RESIDUAL, arguments


ROWS = {
    "bias_dropout_residual": row(True, by_rows=False),
    "bias_dropout_residual by rows": row(True, by_rows=True),
    "bias_dropout_residual without bias": row(False, by_rows=True),
    "bias_dropout_residual, all dropped": row(False, by_rows=False, keep=0.),
}
