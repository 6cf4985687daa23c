"""Rotary embeddings in the contract table: a table for all heads, one a row, both conventions."""
import torch

from fspeed.ops.rope import ROTARY, rotary_table


def row(interleaved, each=False):
    def arguments(shape):
        dim = 2 * shape[-1]
        positions = torch.randint(0, 1000, shape[:-1] if each else shape[-2:-1])
        return torch.randn(*shape[:-1], dim), rotary_table(positions, dim), interleaved

    return ROTARY, arguments


ROWS = {"rotary": row(False), "rotary, interleaved": row(True), "rotary, interleaved, each row its own": row(True, each=True)}
