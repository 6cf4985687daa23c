"""Rows of the contract: optimizers on flat buckets."""
import torch

from fspeed.ops import clipping, layerwise, optimizers


def bucket(shape, moments):
    p, g, mu = (torch.randn(shape) for _ in range(3))
    return (p, g, mu, torch.rand(shape) + 0.5)[: 2 + moments]


def cut(shape):
    """Three segments, the second empty, and the last one shorter than the bucket."""
    n = torch.Size(shape).numel()
    return torch.tensor([n // 3, n // 3, n - n // 4]), torch.tensor([1.0, 5.0, 0.5])


def adamw(shape):
    return *bucket(shape, 2), torch.tensor([0.9, 0.1, 0.99, 0.01, 0.1, 1e-3, 0.05, 0.5]), *cut(shape), None, 0


def lion(shape):
    return *bucket(shape, 1), torch.tensor([0.9, 0.1, 0.99, 0.01, 0.1, 0.05, 0.5]), *cut(shape), None, 0


def sgd(shape):
    return *bucket(shape, 1), torch.tensor([0.9, 0.1, 0.5]), None, 0, True


def lamb_numbers():
    return torch.tensor([0.9, 0.1, 0.99, 0.01, 0.5, 0.8, 1e-3, 0.05, 0.1, 0.1, 3.0])


def lamb_moments(shape):
    return *bucket(shape, 2), lamb_numbers(), *cut(shape)


def lamb_step(shape):
    p, _, mu, nu = bucket(shape, 2)
    return p, mu, nu, torch.rand(3, 2) + 0.5, lamb_numbers(), *cut(shape), None, 0


ROWS = {
    "adamw": (optimizers._ADAMW, adamw),
    "lion": (optimizers._LION, lion),
    "sgd_momentum": (optimizers._SGD, sgd),
    "lamb_moments": (layerwise.MOMENTS, lamb_moments),
    "lamb_step": (layerwise.STEP, lamb_step),
    "sum_of_squares": (clipping.SQUARES, lambda shape: (torch.randn(shape),)),
}
