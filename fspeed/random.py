"""Random numbers as functions of a key, with the bits of `jax.random`.

A key is an int32 tensor of shape (2,), the words of jax's uint32 key. It is split and folded, and never used up: equal keys give
equal draws under recompute, jit and vmap, and on any number of ranks. A `Key` is what a loss receives inside a step: a raw key, and
where the rows at hand stand in the whole batch. What is drawn by row depends on the key and the global position only, however the
batch is split.

All is a hash of key and counter (`fspeed.ops.threefry`), and costs one hash a draw: 12 ns on a CPU, about 10 us for a key.

>>> k1, k2 = fs.random.split(fs.random.key(42))
>>> fs.random.uniform(k1, (3,))
tensor([0.5303, 0.3134, 0.9015])
"""
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from fspeed import _draws
from fspeed.ops.threefry import threefry_bits, threefry_pairs
from fspeed.shard.pytree import register

Shape = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Key:
    """The key that a loss receives: a raw key, and the global positions of the rows at hand. A pytree.

    `uniform_rows`, `normal_rows` and `dropout` draw by row; all else draws from `data` alone, alike for every part of the batch.

    Args:
        data: a raw key, int32 (2,), the same on all ranks.
        rows: int64 (n,), for each row at hand its place in the whole batch.

    >>> whole, part = Key(key(0), torch.arange(4)), Key(key(0), torch.tensor([2, 3]))
    >>> torch.equal(uniform_rows(part, (5,)), uniform_rows(whole, (5,))[2:])
    True
    """
    data: Tensor
    rows: Tensor

    def fold_in(self, data: int | Tensor) -> "Key":
        return fold_in(self, data)

    def split(self, num: int = 2) -> "tuple[Key, ...]":
        return split(self, num)


register(Key, ("data", "rows"))


def key(seed: int) -> Tensor:
    """The raw key of a seed.

        (0, seed mod 2**32) for seeds of 32 bits, (seed >> 32, seed mod 2**32) for longer ones

    Args:
        seed: in [-2**63, 2**64). Of a seed longer than 32 bits jax keeps the upper half only under `jax_enable_x64`.

    Returns:
        int32 (2,), on the CPU.

    Raises:
        ValueError: the seed is longer than 64 bits.

    >>> key(42)
    tensor([ 0, 42], dtype=torch.int32)
    """
    seed = operator.index(seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"random.key: a seed has at most 64 bits, got {seed}")
    upper = 0 if -(1 << 31) <= seed < 1 << 32 else seed >> 32
    return torch.tensor([_signed(upper), _signed(seed)], dtype=torch.int32, device="cpu")


@overload
def split(key: Tensor, num: Shape = 2) -> Tensor: ...
@overload
def split(key: Key, num: int = 2) -> tuple[Key, ...]: ...
def split(key, num=2):
    """New keys out of one.

        split(key, num)[i] = threefry2x32(key, i)

    Args:
        key: a raw key or a `Key`.
        num: how many; for a raw key it may be a shape.

    Returns:
        int32 (*num, 2); for a `Key` a tuple of them, with its rows.

    >>> k1, k2 = split(key(42))
    >>> k1
    tensor([1832780943,  270669613], dtype=torch.int32)
    """
    if isinstance(key, Key):
        return tuple(Key(data, key.rows) for data in split(key.data, num))
    shape = _shape(num)
    return threefry_pairs(_raw(key), 0, math.prod(shape)).reshape(*shape, 2)


@overload
def fold_in(key: Tensor, data: int | Tensor) -> Tensor: ...
@overload
def fold_in(key: Key, data: int | Tensor) -> Key: ...
def fold_in(key, data):
    """A new key out of one and a number: a step's, a layer's.

        fold_in(key, data) = threefry2x32(key, data)

    Args:
        key: a raw key or a `Key`.
        data: an int in [0, 2**32), or an integer tensor of shape (), of which the low 32 bits count.

    Returns:
        int32 (2,); for a `Key` a `Key` with its rows.

    Raises:
        ValueError: an int out of range. TypeError: a tensor that is no scalar integer.

    >>> fold_in(key(42), 1)
    tensor([   64467757, -1378843660], dtype=torch.int32)
    """
    if isinstance(key, Key):
        return Key(fold_in(key.data, data), key.rows)
    key = _raw(key)
    return threefry_pairs(key, _count(data, key.device), 1).reshape(2)


def bits(key: Tensor | Key, shape: Shape = (), dtype: torch.dtype = torch.int32) -> Tensor:
    """Random bits.

        bits(key, shape).view(-1)[i] = x0 ^ x1,    (x0, x1) = threefry2x32(key, i)

    Args:
        key: a raw key or a `Key`.
        shape: of the result.
        dtype: integer; a signed one holds the bits of jax's unsigned one. 8 or 16 bits are the low ones of 32, 64 are x0, x1.

    Returns:
        dtype, of that shape.

    >>> bits(key(42), (2,))
    tensor([ 2098992034, -1375260455], dtype=torch.int32)
    """
    if dtype not in _SIGNED:
        raise TypeError(f"random.bits: expected an integer dtype, got {dtype}")
    shape, draw = _shape(shape), _draws.bits64 if dtype.itemsize == 8 else threefry_bits
    return draw(_raw(key), 0, math.prod(shape)).to(_SIGNED[dtype]).view(dtype).reshape(shape)


def uniform(
    key: Tensor | Key, shape: Shape = (), dtype: torch.dtype = torch.float32,
    minval: float | Tensor = 0.0, maxval: float | Tensor = 1.0,
) -> Tensor:
    """Uniform draws from [minval, maxval).

        max(minval, u (maxval - minval) + minval),    u in [0, 1) a multiple of 2**-23

    Args:
        key: a raw key or a `Key`.
        shape: of the result.
        dtype: float32, bfloat16 (u is a multiple of 2**-7), float16 (2**-10) or float64 (2**-52).
        minval, maxval: numbers, or tensors that broadcast to shape; differentiable.

    Returns:
        dtype, of that shape. Bits are jax's, but between other bounds than 0 and 1 for float64 (to one ulp) and,
        where a CPU has float16 arithmetic, for float16 (to one rounding at the size of the bounds).

    >>> uniform(key(42), (3,))
    tensor([0.4887, 0.6798, 0.6163])
    """
    shape = _shape(shape)
    u = _draws.fraction(_raw(key), 0, math.prod(shape), dtype).reshape(shape)
    if isinstance(minval, Tensor) or isinstance(maxval, Tensor):
        return _draws.stretch(u, minval, maxval)
    return u if (minval, maxval) == (0, 1) else _draws.blockwise(lambda u: _draws.stretch(u, minval, maxval), u)


def normal(key: Tensor | Key, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal draws.

        sqrt(2) erfinv(u),    u uniform in (-1, 1)

    Args:
        key: a raw key or a `Key`.
        shape: of the result.
        dtype: a floating dtype, as of `uniform`.

    Returns:
        dtype, of that shape; within 3 ulp of jax's (float64: within a relative 1e-12).

    >>> normal(key(42), (3,))
    tensor([-0.0283,  0.4671,  0.2957])

    M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2011.
    """
    return _draws.blockwise(_draws.gaussian, uniform(key, shape, dtype))


def bernoulli(key: Tensor | Key, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """True with probability p.

        uniform(key, shape, p.dtype) < p

    Args:
        key: a raw key or a `Key`.
        p: a number (then drawn in float32) or a floating tensor that broadcasts to shape.
        shape: of the result; by default p's.

    Returns:
        bool, of that shape.

    >>> bernoulli(key(42), 0.65, (3,))
    tensor([ True, False,  True])
    """
    p_shape, dtype = (p.shape, p.dtype) if isinstance(p, Tensor) else ((), torch.float32)
    return uniform(key, p_shape if shape is None else shape, dtype) < p


def randint(
    key: Tensor | Key, shape: Shape, minval: int | Tensor, maxval: int | Tensor, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Uniform integers from [minval, maxval).

        minval + (2**w upper + lower) mod (maxval - minval),    upper and lower two draws of w bits: 32, for int64 64

    Args:
        key: a raw key or a `Key`.
        shape: of the result.
        minval, maxval: ints, or integer tensors that broadcast to shape; clipped to dtype's range. Where the range is empty, minval
            is drawn.
        dtype: uint8 or a signed integer dtype; for int64, maxval - minval must be below 2**63.

    Returns:
        dtype, of that shape. As in jax, upper counts for 0 where maxval - minval > 2**(w / 2): the bias there is up to
        (maxval - minval) / 2**w.

    >>> randint(key(42), (4,), 0, 10)
    tensor([4, 4, 1, 9], dtype=torch.int32)
    """
    if dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"random.randint: expected uint8 or a signed integer dtype, got {dtype}")
    key, shape, wide, info = _raw(key), _shape(shape), dtype == torch.int64, torch.iinfo(dtype)
    draw, rem, wrap = (_draws.bits64, _draws.unsigned_rem, -1) if wide else (_draws.bits32, operator.mod, _draws.LOW)
    low = torch.as_tensor(minval, dtype=torch.int64, device=key.device).clamp(info.min, info.max)
    high = torch.as_tensor(maxval, dtype=torch.int64, device=key.device).clamp(info.min, info.max if wide else info.max + 1)
    span = (high - low).clamp(min=1)
    upper, lower = (draw(k, 0, math.prod(shape)).reshape(shape) for k in split(key))
    root = (1 << (32 if wide else 16)) % span           # whose square is 2**w mod span, or taken for 0
    offset = rem(rem(upper, span) * rem(root * root & wrap, span) + rem(lower, span), span)
    return (low + offset).to(dtype)


def permutation(key: Tensor | Key, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """x in a random order, or the integers below x.

        x, sorted by random bits as many times as make it improbable that two elements have the same bits each time

    Args:
        key: a raw key or a `Key`.
        x: a tensor, or an int.
        axis: along which x is shuffled.
        independent: whether each line along the axis gets an order of its own.

    Returns:
        As x; int64 (x,) for an int.

    Cost: ceil(3 ln(n) / 22) sorts of n elements.

    >>> permutation(key(42), 5)
    tensor([4, 2, 3, 0, 1])
    """
    key = _raw(key)
    if not isinstance(x, Tensor):
        return _shuffle(key, torch.arange(x, device=key.device), 0)
    if independent or x.ndim == 1:
        return _shuffle(key, x, axis)
    return x.index_select(axis, _shuffle(key, torch.arange(x.shape[axis], device=key.device), 0))


def categorical(key: Tensor | Key, logits: Tensor, axis: int = -1, shape: Shape | None = None) -> Tensor:
    """Indices drawn with the probabilities softmax(logits, axis).

        argmax(logits - log(-log(u)), axis),    u uniform in [tiny, 1)

    Args:
        key: a raw key or a `Key`.
        logits: a floating dtype.
        axis: that of the categories.
        shape: of the result; its last dims are those of logits without axis, or such as these broadcast to. By default just these.

    Returns:
        int64, of that shape.

    Cost: one hash for each draw and category.

    >>> categorical(key(42), torch.tensor([0.0, 1.0, 2.0]), shape=(6,))
    tensor([2, 2, 2, 2, 1, 2])

    C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014.
    """
    axis = axis % logits.ndim - logits.ndim
    batch = [size for i, size in enumerate(logits.shape, -logits.ndim) if i != axis]
    drawn = list(batch if shape is None else _shape(shape))
    drawn.insert(len(drawn) + 1 + axis, logits.shape[axis])
    u = uniform(key, drawn, logits.dtype, torch.finfo(logits.dtype).tiny, 1.0)
    return (logits - torch.log(-torch.log(u))).argmax(axis)


def uniform_rows(key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """For each row at hand the draws from [0, 1) that it has in the whole batch.

        uniform_rows(key, shape) = uniform(key.data, (N, *shape))[key.rows]    in a whole batch of any number N of rows

    Args:
        key: a `Key`.
        shape: of one row's draws.
        dtype: a floating dtype, as of `uniform`.

    Returns:
        dtype (n, *shape) for n rows, on their device.

    >>> uniform_rows(Key(key(42), torch.tensor([0, 2])), (2,))
    tensor([[0.4887, 0.6798],
            [0.4506, 0.5859]])
    """
    if not isinstance(key, Key):
        raise TypeError("draws by row need a random.Key(key, rows), with each row's place in the whole batch; got a raw key")
    shape = _shape(shape)
    n = math.prod(shape)
    return _draws.fraction(_raw(key).to(key.rows.device), key.rows * n, n, dtype).reshape(*key.rows.shape, *shape)


def normal_rows(key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """For each row at hand the standard normal draws that it has in the whole batch.

        normal_rows(key, shape) = normal(key.data, (N, *shape))[key.rows]    in a whole batch of any number N of rows

    Args:
        key: a `Key`.
        shape: of one row's draws.
        dtype: a floating dtype, as of `uniform`.

    Returns:
        dtype (n, *shape) for n rows, on their device.

    >>> normal_rows(Key(key(42), torch.tensor([0, 2])), (2,))
    tensor([[-0.0283,  0.4671],
            [-0.1240,  0.2169]])
    """
    return _draws.blockwise(_draws.gaussian, uniform_rows(key, shape, dtype))


def dropout(key: Tensor | Key | None, x: Tensor, rate: float) -> Tensor:
    """x with elements zeroed at the given rate, and the others scaled so that the mean stays.

        where(u < 1 - rate, x, 0) / (1 - rate),    u = uniform_rows(key, x.shape[1:]), or uniform(key, x.shape) for a raw key

    In plain operations: differentiable any number of times in both modes, under vmap, jit and recompute. Backward keeps one byte an
    element, as `F.dropout` does: to hash again would cost 12 ns, and the byte costs 0.1.

    Args:
        key: a `Key` with one row for each of x's first dim; a raw key, to draw by the flat index in x, as Flax and Equinox do; or
            None, where nothing is random, as in evaluation.
        x: a floating dtype.
        rate: in [0, 1].

    Returns:
        As x; x itself at rate 0 and for None.

    Raises:
        ValueError: rate is out of range, or x has not the key's rows.

    >>> dropout(key(42), torch.ones(2, 3), 0.5)
    tensor([[2., 0., 0.],
            [0., 2., 0.]])

    N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15, 2014.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"random.dropout: rate is a probability, got {rate}")
    if rate == 0 or key is None:
        return x
    return torch.where(_uniform_like(key, x) < 1 - rate, x, 0) / (1 - rate or 1.0)


def _uniform_like(key: Tensor | Key, x: Tensor) -> Tensor:
    if not isinstance(key, Key):
        return uniform(_raw(key).to(x.device), x.shape)
    if x.shape[:1] != key.rows.shape:
        raise ValueError(
            f"random.dropout: the key has {len(key.rows)} rows, x has shape {tuple(x.shape)}; x's first dim must be these rows. "
            "Reshape x, or pass key.data, whose mask goes by the flat index in x and so depends on how the batch is split"
        )
    return uniform_rows(Key(key.data, key.rows.to(x.device)), x.shape[1:])


def _shuffle(key: Tensor, x: Tensor, axis: int) -> Tensor:
    for _ in range(math.ceil(3 * math.log(max(1, x.numel())) / math.log(_draws.LOW))):
        key, subkey = split(key)
        unsigned_order = bits(subkey, x.shape) ^ torch.iinfo(torch.int32).min
        x = x.take_along_dim(unsigned_order.argsort(stable=True, dim=axis), axis)
    return x


def _raw(key: Tensor | Key) -> Tensor:
    data = key.data if isinstance(key, Key) else key
    if not isinstance(data, Tensor) or data.dtype != torch.int32 or data.shape != (2,):
        got = f"{data.dtype} of shape {tuple(data.shape)}" if isinstance(data, Tensor) else repr(data)
        raise TypeError(f"a key is an int32 tensor of shape (2,), as random.key makes; got {got}. For many keys use torch.vmap")
    return data


def _count(data: int | Tensor, device: torch.device) -> int | Tensor:
    """What is folded in, as a counter of 32 bits."""
    if isinstance(data, Tensor):
        if data.ndim or data.dtype.is_floating_point or data.dtype.is_complex:
            raise TypeError(f"random.fold_in: expected an integer of shape (), got {data.dtype} of shape {tuple(data.shape)}")
        return data.to(device, torch.int64) & _draws.LOW
    data = operator.index(data)
    if not 0 <= data <= _draws.LOW:
        raise ValueError(f"random.fold_in: expected an int in [0, 2**32), got {data}")
    return data


def _shape(shape: Shape) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, Sequence) else (shape,)


def _signed(word: int) -> int:
    return (word + (1 << 31) & _draws.LOW) - (1 << 31)


_SIGNED = {
    torch.int8: torch.int8, torch.int16: torch.int16, torch.int32: torch.int32, torch.int64: torch.int64,
    torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
}
