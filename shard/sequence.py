"""Attention over a sequence that an axis divides: by heads for positions (Ulysses), or with keys and values going round (ring).

A sequence is cut into 2 N equal chunks, of which rank r of N has the r-th and the r-th from the end, in this order: so under a
causal mask every rank has equal work at every moment.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import ppermute
from .linear import linear
from .mesh import Axis
from .wire import start_exchange


def split_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """This rank's part of whole sequences: chunks r and 2 size - 1 - r of 2 size.

    Args:
        x: whole sequences, any dtype.
        axis: the ranks that share them.
        dim: the sequence's.

    Returns: x's shape with dim divided by size.
    Raises: ValueError if dim is no multiple of 2 size.

    >>> split_sequence(torch.arange(8).unsqueeze(0), Axis("seq", 0, 1, 2, None))
    tensor([[2, 3, 4, 5]])

    Source: balanced chunks as in Brandon et al., "Striped attention", arXiv 2311.09431, and Llama 3, arXiv 2407.21783.
    """
    if axis.size == 1:
        return x
    if x.shape[dim] % (2 * axis.size):
        raise ValueError(
            f"the {axis.size} ranks of axis {axis.name!r} take 2 equal chunks each of a sequence, but dim {dim} of "
            f"{tuple(x.shape)} is no multiple of {2 * axis.size}; pad it, and mask the padding in the loss"
        )
    chunks = x.chunk(2 * axis.size, dim)
    return torch.cat((chunks[axis.rank], chunks[-1 - axis.rank]), dim)


def positions(length: int, axis: Axis, device: torch.device | str | None = None) -> Tensor:
    """Where this rank's part of a sequence stands in the whole.

    Args:
        length: of the part.
        axis: the ranks that share the sequence.

    Returns: int64 (length,).

    >>> positions(4, Axis("seq", 0, 0, 2, None))
    tensor([0, 1, 6, 7])
    """
    return split_sequence(torch.arange(length * axis.size, device=device), axis, dim=0)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool = True) -> Tensor:
    """Attention over whole sequences, each rank for some of the heads: heads are exchanged for positions, and back.

        y_r = part r of softmax(q k^T / sqrt(head_dim)) v

    Args:
        q: (batch, heads, positions / size, head_dim), this rank's part as `split_sequence` cuts it. Any number of heads: ranks
            have one more or one less where size does not divide it.
        k, v: (batch, kv_heads, positions / size, head_dim); kv_heads divides heads. They travel as they are where size divides
            kv_heads, and repeated for each of their query's heads where it does not.
        axis: the ranks that share the sequence.
        causal: whether a position sees only those up to itself.

    Returns: as q.
    Raises: ValueError if kv_heads does not divide heads.
    Cost: (size - 1) / size of q, k, v and y sent, in four exchanges, and as many in backward. It holds q, k, v of the whole
        sequence for 1 / size of the heads.

    >>> q = torch.ones(1, 3, 4, 2)
    >>> ulysses_attention(q, q, q, Axis("seq", 0, 0, 1, None)).shape
    torch.Size([1, 3, 4, 2])

    Source: Jacobs et al., arXiv 2309.14509.
    """
    check_heads("ulysses_attention", q, k, v)
    heads = q.shape[1]
    if k.shape[1] % axis.size:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    q, k, v = (to_heads(x, axis) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return to_positions(y, axis, heads)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool = True) -> Tensor:
    """Attention of this rank's queries while keys and values go round the ranks.

        y = sum over ranks s of exp(l_s - l) y_s,    l = log(sum over s of exp(l_s)),
        y_s, l_s: attention to what rank s has, and the logarithm of its sum

    Under a causal mask a rank computes only what is seen: of what an earlier rank has, the first chunk for both of its own; of what
    a later one has, both chunks for its second. So each rank does 1/2 of the products of all positions at every step but the first.

    Args:
        q: (batch, heads, positions / size, head_dim), this rank's part as `split_sequence` cuts it.
        k, v: (batch, kv_heads, positions / size, head_dim); kv_heads divides heads.
        axis: the ranks that share the sequence.
        causal: whether a position sees only those up to itself.

    Returns: as q; sums are taken in at least float32.
    Raises: ValueError if kv_heads does not divide heads.
    Cost: (size - 1) (k + v) sent, and as many in backward. Backward keeps keys and values of all ranks, and the weights of this
        rank's queries; under `checkpoint` a layer at a time.

    >>> q = torch.ones(1, 3, 4, 2)
    >>> ring_attention(q, q, q, Axis("seq", 0, 0, 1, None)).shape
    torch.Size([1, 3, 4, 2])

    Source: Liu et al., arXiv 2310.01889.
    """
    check_heads("ring_attention", q, k, v)
    dtype, half, size = q.dtype, q.shape[2] // 2, axis.size
    scaled = q.to(torch.promote_types(dtype, torch.float32)) / q.shape[-1] ** 0.5
    found: list[tuple[Tensor, Tensor] | None] = [None, None]      # of both chunks of queries
    pair = torch.stack((k, v))
    for i in range(size):
        source = (axis.rank - i) % size
        keys, values = pair.unbind()
        if not causal or source == axis.rank:
            new = halves(attended(scaled, keys, values, causal))
        elif source < axis.rank:
            new = halves(attended(scaled, keys[:, :, :half], values[:, :, :half]))
        else:
            new = [None, attended(scaled[:, :, half:], keys, values)]
        found = [both(a, b) for a, b in zip(found, new, strict=True)]
        if i < size - 1:
            pair = ppermute(pair, axis, [(rank, (rank + 1) % size) for rank in range(size)])
    return torch.cat([y for y, _ in filter(None, found)], 2).to(dtype)


# ---- attention in parts


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries, and the logarithm of the sum of each one's weights."""
    k, v = (x.to(q.dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    return (scores - total).exp() @ v, total


def halves(part: tuple[Tensor, Tensor]) -> list:
    """Attention of the two chunks of queries."""
    (y, total), half = part, part[0].shape[2] // 2
    return [(y[:, :, :half], total[:, :, :half]), (y[:, :, half:], total[:, :, half:])]


def both(a: tuple[Tensor, Tensor] | None, b: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Attention to two sets of keys, from that to each."""
    if a is None or b is None:
        return a or b
    (y, m), (z, n) = a, b
    total = torch.logaddexp(m, n)
    return y * (m - total).exp() + z * (n - total).exp(), total


# ---- heads for positions


def to_heads(x: Tensor, axis: Axis) -> Tensor:
    """(batch, heads, positions / size, ...) of all heads -> (batch, this rank's heads, positions, ...), in their order."""
    if axis.size == 1:
        return x
    counts = heads_of(x.shape[1], axis)
    return linear(x, lambda x: gathered(x, counts, axis), lambda c: scattered(c, counts, axis))


def to_positions(x: Tensor, axis: Axis, heads: int) -> Tensor:
    """The inverse of `to_heads`, and its transpose."""
    if axis.size == 1:
        return x
    counts = heads_of(heads, axis)
    return linear(x, lambda x: scattered(x, counts, axis), lambda c: gathered(c, counts, axis))


def heads_of(heads: int, axis: Axis) -> list[int]:
    """How many heads each rank has."""
    return [heads // axis.size + (rank < heads % axis.size) for rank in range(axis.size)]


def gathered(x: Tensor, counts: list[int], axis: Axis) -> Tensor:
    size, mine = axis.size, counts[axis.rank]
    flat = x.transpose(0, 1).reshape(-1)
    one = flat.numel() // sum(counts)
    arrived = start_exchange("ulysses", flat, axis, [one * n for n in counts], [one * mine] * size).wait()
    batch, _, length, *rest = x.shape
    parts = arrived.view(size, mine, batch, 2, length // 2, *rest)
    chunks = torch.cat((parts[:, :, :, 0], parts[:, :, :, 1].flip(0)))              # (chunks, heads, batch, length, ...)
    return chunks.movedim(0, 2).flatten(2, 3).transpose(0, 1)


def scattered(x: Tensor, counts: list[int], axis: Axis) -> Tensor:
    size, mine = axis.size, counts[axis.rank]
    batch, _, length, *rest = x.shape
    chunks = x.transpose(0, 1).unflatten(2, (2 * size, length // (2 * size))).movedim(2, 0)
    flat = torch.stack((chunks[:size], chunks[size:].flip(0)), 3).reshape(-1)       # (size, heads, batch, 2, length, ...)
    one = flat.numel() // (size * mine) if mine else batch * length // size * prod(rest)
    arrived = start_exchange("ulysses", flat, axis, [one * mine] * size, [one * n for n in counts]).wait()
    return arrived.view(sum(counts), batch, length // size, *rest).transpose(0, 1)


def prod(shape: list[int]) -> int:
    return int(torch.Size(shape).numel())


def check_heads(who: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{who}: q, k and v of shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; expected (batch, heads, "
            "positions, head_dim), with as many positions, and a number of heads of k and v that divides that of q"
        )
