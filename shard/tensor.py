"""Tensor parallelism as plain functions: each rank has a slice of every large weight, and calls these in its loss.

Collectives have their true transposes, and every rank's loss counts; so a backward pass sends what its forward pass sent, and no
function needs to know whether its cotangent is the same on all ranks. Weights lie as in `torch.nn.functional.linear`: (out, in).
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import all_gather, pmax, psum, reduce_scatter
from .mesh import Axis


def column_parallel_linear(
    x: Tensor, weight: Tensor, axis: Axis, bias: Tensor | None = None, *, sequence_dim: int | None = None
) -> Tensor:
    """A linear map whose outputs are divided over an axis.

        y_r = x w_r^T + b_r,    the r-th part of x w^T + b

    Args:
        x: (..., in), the same on every rank; or its r-th part along `sequence_dim`.
        weight: (out / size, in), this rank's rows.
        axis: the ranks that share the weight.
        bias: (out / size,), this rank's part.
        sequence_dim: the dim of x that is divided over the axis and gathered here: then norms and dropout before it work on parts.

    Returns: (..., out / size).
    Raises: ValueError if x and weight do not fit.
    Cost: none sent; with `sequence_dim`, (size - 1) x bytes received, and as many in backward.

    >>> column_parallel_linear(torch.ones(1, 2), torch.ones(3, 2), Axis("model", 0, 0, 1, None))
    tensor([[2., 2., 2.]])

    Source: Shoeybi et al., arXiv 1909.08053; by sequence, Korthikanti et al., arXiv 2205.05198.
    """
    refuse_misfit("column_parallel_linear", x, weight, axis)
    return F.linear(x if sequence_dim is None else all_gather(x, axis, dim=sequence_dim), weight, bias)


def row_parallel_linear(
    x: Tensor, weight: Tensor, axis: Axis, bias: Tensor | None = None, *, sequence_dim: int | None = None
) -> Tensor:
    """A linear map whose inputs are divided over an axis.

        y = sum over ranks r of x_r w_r^T, + b

    Args:
        x: (..., in / size), this rank's part of the inputs.
        weight: (out, in / size), this rank's columns.
        axis: the ranks that share the weight.
        bias: (out,), the same on every rank.
        sequence_dim: the dim of y of which each rank is given its part.

    Returns: (..., out), the same on every rank; or its r-th part along `sequence_dim`.
    Raises: ValueError if x and weight do not fit, or the axis does not divide `sequence_dim`.
    Cost: 2 (size - 1) / size y bytes sent, and as many in backward; with `sequence_dim`, half.

    >>> row_parallel_linear(torch.ones(1, 2), torch.ones(3, 2), Axis("model", 0, 0, 1, None))
    tensor([[2., 2., 2.]])

    Source: Shoeybi et al., arXiv 1909.08053; by sequence, Korthikanti et al., arXiv 2205.05198.
    """
    refuse_misfit("row_parallel_linear", x, weight, axis)
    y = F.linear(x, weight)
    y = psum(y, axis) if sequence_dim is None else reduce_scatter(y, axis, dim=sequence_dim)
    return y if bias is None else y + bias


def parallel_attention(
    x: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, axis: Axis, *, head_dim: int, causal: bool = True,
    sequence_dim: int | None = None,
) -> Tensor:
    """Self-attention whose heads are divided over an axis.

        y = sum over ranks r of attention(x q_r^T, x k_r^T, x v_r^T) o_r^T

    Args:
        x: (batch, positions, width), the same on every rank; or its part along `sequence_dim`.
        query: (heads head_dim / size, width), the rows of this rank's heads.
        key, value: (kv_heads head_dim / size, width); with fewer heads than query, each serves a group of its heads.
        out: (width, heads head_dim / size), the columns of this rank's heads.
        axis: the ranks that share the heads.
        head_dim: elements a head.
        causal: whether a position sees only those up to itself.
        sequence_dim: as of `column_parallel_linear` and `row_parallel_linear`.

    Returns: as x.
    Raises: ValueError if a rank's rows are no whole number of heads, or key has other heads than value.
    Cost: 2 (size - 1) / size x bytes sent, and as many in backward.

    >>> w = torch.eye(4)
    >>> parallel_attention(torch.ones(1, 2, 4), w, w, w, w, Axis("model", 0, 0, 1, None), head_dim=2).shape
    torch.Size([1, 2, 4])

    Source: Shoeybi et al., arXiv 1909.08053.
    """
    for name, weight in (("query", query), ("key", key), ("value", value)):
        if weight.shape[0] % head_dim or not weight.shape[0]:
            raise ValueError(
                f"parallel_attention: {name} has {weight.shape[0]} rows here, which are no whole heads of {head_dim}; "
                f"the {axis.size} ranks of axis {axis.name!r} must divide the number of heads"
            )
    x = x if sequence_dim is None else all_gather(x, axis, dim=sequence_dim)
    q, k, v = (column_parallel_linear(x, w, axis).unflatten(-1, (-1, head_dim)).transpose(-2, -3) for w in (query, key, value))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[-3] != k.shape[-3])
    return row_parallel_linear(y.transpose(-2, -3).flatten(-2), out, axis, sequence_dim=sequence_dim)


def vocab_parallel_embedding(tokens: Tensor, weight: Tensor, axis: Axis, *, sequence_dim: int | None = None) -> Tensor:
    """Rows of a table that is divided by rows over an axis.

        y = sum over ranks r of (the token's row, if rank r has it, else 0)

    Args:
        tokens: int64, any shape, the same on every rank, in [0, vocabulary).
        weight: (vocabulary / size, width), this rank's rows.
        axis: the ranks that share the table.
        sequence_dim: the dim of y of which each rank is given its part.

    Returns: (*tokens.shape, width), the same on every rank; or its part along `sequence_dim`. A token out of range gives zeros.
    Cost: 2 (size - 1) / size y bytes sent, and as many in backward; with `sequence_dim`, half.

    >>> vocab_parallel_embedding(torch.tensor([1]), torch.tensor([[1.], [2.]]), Axis("model", 0, 0, 1, None))
    tensor([[2.]])

    Source: Shoeybi et al., arXiv 1909.08053.
    """
    mine, local = owned(tokens, weight.shape[0], axis)
    y = torch.where(mine.unsqueeze(-1), F.embedding(local, weight), 0.0)
    return psum(y, axis) if sequence_dim is None else reduce_scatter(y, axis, dim=sequence_dim)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
    """Cross entropy of logits whose last dim is divided over an axis.

        l = log(sum over the vocabulary v of exp(logits_v)) - logits_target

    Args:
        logits: (..., vocabulary / size), this rank's columns; computed in at least float32.
        targets: int64 (...), the same on every rank, in [0, vocabulary).
        axis: the ranks that share the vocabulary.

    Returns: (...), in at least float32, the same on every rank.
    Raises: ValueError if the shapes do not fit.
    Cost: 6 (size - 1) / size numbers a target sent, and 4 (size - 1) / size in backward.

    >>> vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([2]), Axis("model", 0, 0, 1, None))
    tensor([1.3863])

    Source: Shoeybi et al., arXiv 1909.08053.
    """
    if logits.shape[:-1] != targets.shape:
        shapes = f"{tuple(logits.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"vocab_parallel_cross_entropy: logits and targets of shapes {shapes}; expected (..., classes) and (...)")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - pmax(logits.detach().amax(-1), axis).unsqueeze(-1)
    mine, local = owned(targets, logits.shape[-1], axis)
    here = torch.where(mine, logits.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
    total, target = psum(torch.stack((logits.exp().sum(-1), here)), axis).unbind()
    return total.log() - target


# ---- which of a table's rows a rank has


def owned(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Whether this rank has a token's row, of so many rows a rank, and which it is of its own (any, where it has not)."""
    local = tokens - axis.rank * rows
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)


def refuse_misfit(who: str, x: Tensor, weight: Tensor, axis: Axis) -> None:
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{who}: x has {x.shape[-1]} features and the weight, of shape {tuple(weight.shape)} here, takes {weight.shape[-1]}; "
            f"the specs of tensor_shard say which dim is divided over axis {axis.name!r}"
        )
