"""Compression of gradients and weights that are sent: signs as bits with error feedback, and integers of 8 or 4 bits, by blocks.

Each block has one scale, in float32: 1.03 bits an element of signs in blocks of 1024, 8.13 and 4.13 of integers in blocks of 256.
"""
import torch
from torch import Tensor

from ..op import of_kernel, op
from ..optimizers import aligned
from . import cpu, reference

SIGN_PACK = op("sign_pack(Tensor x, Tensor error, int block) -> (Tensor, Tensor, Tensor)", reference.sign_pack,
               of_kernel(__package__, "sign_pack"), cpu.sign_pack)
SIGN_UNPACK = op("sign_unpack(Tensor bits, Tensor scales, int n, int block) -> Tensor", reference.sign_unpack,
                 of_kernel(__package__, "sign_unpack"), cpu.sign_unpack)
QUANTISE = op("quantise(Tensor x, Tensor? key, int start, int bits, int block) -> (Tensor, Tensor)", reference.quantise,
              of_kernel(__package__, "quantise"), cpu.quantise)
DEQUANTISE = op("dequantise(Tensor codes, Tensor scales, int n, int bits, int block) -> Tensor", reference.dequantise,
                of_kernel(__package__, "dequantise"))


def sign_pack(x: Tensor, error: Tensor | None = None, *, block: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """Signs as bits, a scale for each block, and what is lost, to be added next time.

        b = x + error;    scale = sqrt(mean b^2) over a block;    b = scale sign(b) + new error

    Args:
        x: what is sent, of any shape, taken flat.
        error: what was lost last time, of x's shape; None is zeros.
        block: elements that share a scale, a power of two from 8 to 8192.

    Returns:
        uint8 (ceil(n / 8),), bit j of byte i set where element 8 i + j is negative; the scales, float32 (ceil(n / block),);
        and the new error, of x's shape and the error's dtype.

    Raises:
        ValueError: no such block, or an error of another shape.

    Cost: one pass: 12 bytes an element in float32.

    Source: Tang et al., arXiv 2102.02888; blocks: Zheng et al., arXiv 1905.10936.

    >>> bits, scales, lost = sign_pack(torch.tensor([1., -3., 2., 0.]))
    >>> bits, scales, lost
    (tensor([2], dtype=torch.uint8), tensor([1.8708]), tensor([-0.8708, -1.1292,  0.1292, -1.8708]))
    """
    checked(block, 8)
    error = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if error is None else error
    if error.shape != x.shape:
        raise ValueError(f"sign_pack: the error has shape {tuple(error.shape)}, x {tuple(x.shape)}: give what was lost of this x")
    return SIGN_PACK(x, error, block)


def sign_unpack(bits: Tensor, scales: Tensor, n: int, *, block: int = 1024) -> Tensor:
    """What `sign_pack` sends, or, of some ranks' at once, their mean.

        scale sign

    Args:
        bits, scales: as `sign_pack` makes them, or with a row for each rank.
        n: how many elements.
        block: as it was packed.

    Returns:
        float32 (n,).

    Cost: 4 bytes an element written, and an eighth read a rank.

    >>> bits, scales, lost = sign_pack(torch.tensor([1., -3., 2., 0.]))
    >>> sign_unpack(bits, scales, 4)
    tensor([ 1.8708, -1.8708,  1.8708,  1.8708])
    """
    checked(block, 8)
    by_rank = (bits, scales) if bits.dim() == 2 else (bits[None], scales[None])
    return SIGN_UNPACK(*by_rank, n, block)


def quantise(
    x: Tensor, *, bits: int = 8, block: int = 256, key: Tensor | None = None, start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Integers of 8 or 4 bits, and a scale for each block.

        scale = max |x| / most over a block, most = 127 or 7;    code = x / scale, rounded to nearest, or by a key

    A block that holds inf or NaN has a scale that is inf: nothing of it comes back finite.

    Args:
        x: of any shape, taken flat.
        bits: 8 or 4.
        block: elements that share a scale, a power of two from 8 to 8192.
        key: int32 (2,): round up with the probability that leaves the mean, by 16 random bits of key and position, as `adamw`.
        start: the position of x's first element, a multiple of 4.

    Returns:
        int8 (n,), or uint8 (ceil(n / 2),), the first of two in the lower half; and scales, float32 (ceil(n / block),).

    Raises:
        ValueError: no such number of bits, block or start.

    Cost: one pass: 5 bytes an element in float32, 4.5 with 4 bits.

    Source: Dettmers et al., arXiv 2110.02861; rounding: Alistarh et al., arXiv 1610.02132.

    >>> quantise(torch.tensor([1., -2., .1]))
    (tensor([  64, -127,    6], dtype=torch.int8), tensor([0.0157]))
    """
    checked(block, bits)
    return QUANTISE(x, key, aligned(start), bits, block)


def dequantise(codes: Tensor, scales: Tensor, n: int, *, bits: int = 8, block: int = 256) -> Tensor:
    """Numbers again.

        code scale

    Args:
        codes, scales: as `quantise` makes them.
        n: how many elements.
        bits, block: as they were quantised.

    Returns:
        float32 (n,).

    Cost: 5 bytes an element, 4.5 with 4 bits.

    >>> dequantise(*quantise(torch.tensor([1., -2., .1]), bits=4), 3, bits=4)
    tensor([ 1.1429, -2.0000,  0.0000])
    """
    checked(block, bits)
    return DEQUANTISE(codes, scales, n, bits, block)


def checked(block: int, bits: int) -> None:
    if bits not in reference.MOST:
        raise ValueError(f"quantise: bits must be 8 or 4, and is {bits}")
    if block & (block - 1) or not 8 <= block <= 8192:
        raise ValueError(f"block must be a power of two from 8 to 8192, and is {block}")
