"""Threefry2x32: random words as a hash of a key and a counter, so that any draw can be made anywhere, alone and again.

    x0, x1 = threefry2x32(key, (counter >> 32, counter & 0xffffffff))

A key is an int32 tensor of shape (2,), two 32-bit words. Counters are 64 bits wide: start + i for i in [0, n), from one start or
from each of many. The three functions differ in what they keep of x0 and x1.

Ten million draws on one core, where `torch.rand` takes 45 ms: 115 ms in blocks that stay in the cache, 3 s in plain operations, as
that traces, batches of keys (vmap) and other devices get. One draw takes about 10 us. On a GPU a draw takes 117 instructions, and
nothing but the result is written.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""
from torch import Tensor

from .dispatch import dispatch
from .dispatch import traced as traced


def threefry_pairs(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    """Both words at each counter: n new keys from each start, or the halves of n draws of 64 bits.

        out[..., i, :] = x0, x1    at the counter start[...] + i

    Args:
        key: int32 (2,).
        start: the first counter: an int, or int64 (...) on the key's device.
        n: how many from each start.

    Returns:
        int32 (..., n, 2).

    >>> threefry_pairs(torch.tensor([0, 42], dtype=torch.int32), 0, 2)
    tensor([[ 1832780943,   270669613],
            [   64467757, -1378843660]], dtype=torch.int32)
    """
    path, key, start = dispatch(key, start)
    return path.pairs(key, start, n)


def threefry_bits(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    """32 random bits at each counter.

        out[..., i] = x0 ^ x1    at the counter start[...] + i

    Args:
        key: int32 (2,).
        start: the first counter: an int, or int64 (...) on the key's device.
        n: how many from each start.

    Returns:
        int32 (..., n).

    >>> threefry_bits(torch.tensor([0, 42], dtype=torch.int32), torch.tensor([0, 2**40]), 3).shape
    torch.Size([2, 3])
    """
    path, key, start = dispatch(key, start)
    return path.bits(key, start, n)


def threefry_uniform(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    """A uniform draw from [0, 1) at each counter, a multiple of 2**-23.

        out[..., i] = ((x0 ^ x1) >> 9) / 2**23    at the counter start[...] + i

    Args:
        key: int32 (2,).
        start: the first counter: an int, or int64 (...) on the key's device.
        n: how many from each start.

    Returns:
        float32 (..., n).

    >>> threefry_uniform(torch.tensor([0, 42], dtype=torch.int32), 0, 2)
    tensor([0.4887, 0.6798])
    """
    path, key, start = dispatch(key, start)
    return path.uniform(key, start, n)
