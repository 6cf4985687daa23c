"""Rows of the contract: optimizers on flat buckets."""
import torch

from fspeed.ops import blockwise, clipping, layerwise, newton, optimizers
from fspeed.testing.ops import wide


def bucket(shape, moments):
    p, g, mu = (torch.randn(shape) for _ in range(3))
    return (p, g, mu, torch.rand(shape) + 0.5)[: 2 + moments]


def cut(shape):
    """Three segments, the second empty, and the last one shorter than the bucket."""
    n = torch.Size(shape).numel()
    return torch.tensor([n // 3, n // 3, n - n // 4]), torch.tensor([1.0, 5.0, 0.5])


def adamw(shape):
    return *bucket(shape, 2), torch.tensor([0.9, 0.1, 0.99, 0.01, 0.1, 1e-3, 0.05, 0.5]), *cut(shape), None, 0


NARROW = (torch.Tensor.half, torch.Tensor.bfloat16)


def alike(args):
    codes, exact = (blockwise.ADAMW8BIT(*some)[1:3] for some in (args, wide(args)))
    return all(map(torch.equal, codes, exact))


def adamw8bit(shape):
    """Drawn again until no moment is so near the middle of two codes that float32 chooses another than float64."""
    n = torch.Size(shape).numel()
    codes = torch.randint(-127, 128, shape, dtype=torch.int8), torch.randint(256, shape, dtype=torch.uint8)
    scales = torch.rand(2, -(-n // 256)).unbind()
    while True:
        p, g = bucket(shape, 0)
        args = (p, g, *codes, *scales, torch.tensor([0.9, 0.1, 0.99, 0.01, 0.1, 1e-3, 0.05, 0.5]), *cut(shape), None, 0)
        if alike(args) and all(alike([to(x) if i in (0, 1, 4, 5, 6, 8) else x for i, x in enumerate(args)]) for to in NARROW):
            return args


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


def matrices(shape):
    x = torch.randn(shape)
    return x if len(shape) > 1 else x[: x.numel() // 5 * 5 or 1].reshape(min(5, x.numel()), -1), [2.0, -1.5, 0.5] * 2, 0.5


ROWS = {
    "adamw": (optimizers._ADAMW, adamw),
    "lion": (optimizers._LION, lion),
    "sgd_momentum": (optimizers._SGD, sgd),
    "adamw8bit": (blockwise.ADAMW8BIT, adamw8bit),
    "lamb_moments": (layerwise.MOMENTS, lamb_moments),
    "lamb_step": (layerwise.STEP, lamb_step),
    "newton_schulz": (newton.ITERATION, matrices),
    "sum_of_squares": (clipping.SQUARES, lambda shape: (torch.randn(shape),)),
}
