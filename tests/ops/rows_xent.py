"""Cross entropy in the table of contracts: x is (..., V), or (..., D)."""
import torch

from fspeed.ops.xent import linear_statistics, linear_sum, row_statistics

WIDTH = 11             # vocabulary of the linear forms


def draw(shape, width):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=draw), torch.randint(-1, width + 1, shape[:-1], generator=draw)


def rows(shape):
    return draw(shape, shape[-1])


def layer(shape):
    x, targets = draw(shape, WIDTH)
    return x, torch.randn(WIDTH, shape[-1]) / shape[-1] ** 0.5, torch.randn(WIDTH), targets, 7


def whole(shape):
    x, weight, bias, targets, chunk = layer(shape)
    return x, weight, bias, targets, torch.rand(targets.shape), 0.1, 0.01, chunk, True


ROWS = {
    "cross_entropy": (row_statistics, rows),
    "linear_cross_entropy": (linear_statistics, layer),
    "linear_cross_entropy_sum": (linear_sum, whole),
}
