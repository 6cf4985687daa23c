"""What `fspeed.random` makes of random words: integers, fractions, normal draws."""
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from fspeed.ops.threefry import threefry_bits, threefry_pairs, threefry_uniform, traced

LOW = 0xFFFFFFFF                                       # the low 32 of 64 bits

# dtype: (shift, width): width bits of bits >> shift make a fraction. As in jax, bfloat16 has them from a draw of 8 bits
FRACTIONS = {torch.float64: (12, 52), torch.float32: (9, 23), torch.float16: (6, 10), torch.bfloat16: (1, 7)}
SQRT2 = {dtype: torch.tensor(2**0.5, dtype=dtype).item() for dtype in FRACTIONS}

# Giles's approximations of erfinv, in float32, as XLA has them: torch.erfinv is more exact, so up to 90 ulp off jax in the tails
CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)
TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)


def bits32(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    """32 bits a draw, unsigned, in int64."""
    return threefry_bits(key, start, n).to(torch.int64) & LOW


def bits64(key: Tensor, start: int | Tensor, n: int) -> Tensor:
    """64 bits a draw, in int64."""
    upper, lower = threefry_pairs(key, start, n).to(torch.int64).unbind(-1)
    return upper << 32 | lower & LOW


def fraction(key: Tensor, start: int | Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Draws from [0, 1), of as many random bits as dtype's mantissa has."""
    if dtype == torch.float32:
        return threefry_uniform(key, start, n)
    if dtype not in FRACTIONS:
        raise TypeError(f"random draws have one of the dtypes {', '.join(map(str, FRACTIONS))}; got {dtype}")
    shift, width = FRACTIONS[dtype]
    draws = bits64(key, start, n) if dtype == torch.float64 else threefry_bits(key, start, n)
    return (draws >> shift & (1 << width) - 1).to(dtype) * 2.0**-width


def stretch(u: Tensor, minval: float | Tensor, maxval: float | Tensor) -> Tensor:
    """u from [0, 1) to [minval, maxval). In float32 XLA fuses product and sum, rounding once; by way of float64 so does this."""
    low, high = (torch.as_tensor(bound, dtype=u.dtype, device=u.device) for bound in (minval, maxval))
    wide = u.double() if u.dtype == torch.float32 else u
    return torch.maximum(low, (wide * (high - low) + low).to(u.dtype))


def gaussian(u: Tensor) -> Tensor:
    """Standard normal draws from u in [0, 1)."""
    return erfinv(stretch(u, torch.finfo(u.dtype).eps / 2 - 1, 1.0)) * SQRT2[u.dtype]


def erfinv(x: Tensor) -> Tensor:
    """The inverse error function in (-1, 1)."""
    if x.dtype == torch.float64:
        return torch.erfinv(x)
    y = x.float()
    w = -torch.log1p(-y * y)
    return (torch.where(w < 5, polynomial(CENTRE, w - 2.5), polynomial(TAIL, torch.sqrt(w) - 3)) * y).to(x.dtype)


def polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    return reduce(lambda p, c: p * x + c, coefficients[1:], torch.full_like(x, coefficients[0]))


def blockwise(fn: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """fn(u) for an elementwise fn: on the CPU in blocks that stay in the cache, 3 times as fast, unless a trace would list each."""
    if not u.is_cpu or traced() or u.numel() <= 1 << 16:
        return fn(u)
    return torch.cat([fn(block) for block in u.reshape(-1).split(1 << 16)]).reshape(u.shape)


def unsigned_rem(a: Tensor, b: Tensor) -> Tensor:
    """a mod b for a of 64 unsigned bits in int64, b > 0: the quotient of a / 2, doubled, is at most one too low."""
    least = torch.iinfo(torch.int64).min
    r = a - ((a >> 1 & ~least) // b << 1) * b
    return torch.where(r ^ least >= b ^ least, r - b, r)
