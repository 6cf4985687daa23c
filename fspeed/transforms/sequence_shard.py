"""Sequence parallelism: every rank has a part of each sequence; attention is the loss's business."""
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fspeed.random import Key
from fspeed.shard.mesh import Axis, Mesh
from fspeed.shard.pytree import tree_flatten, tree_paths, tree_unflatten
from fspeed.shard.sequence import positions, split_sequence
from fspeed.step import Step, on_loss, outside, over
from fspeed.transforms._sums import sums
from fspeed.tree import chooser


def sequence_shard(
    step: Step, mesh: Mesh, *, axis: str = "seq", dim: int = 1, leaves: str | Iterable[str] | Callable[[str], bool] = "**"
) -> Step:
    """Same in and out as the step; the loss sees this rank's part of each sequence, and gradients are summed once a step.

        g = sum over ranks of g_rank

    All ranks of the axis pass the same batch, with whole sequences. The loss attends by `ulysses_attention` or `ring_attention` of
    `fspeed.shard.sequence`, and asks `positions` where its part stands. Its mean is over the tokens of all ranks, however they lie.

    Args:
        step: a step.
        mesh: from `fs.mesh`.
        axis: the mesh axis that sequences are divided over, as `split_sequence` does it.
        dim: of the batch's leaves, the sequence's.
        leaves: which leaves of the batch are sequences: key paths, a glob, globs or a predicate. Those without that dim are not.

    Returns:
        A step whose parameters are whole on every rank of the axis.

    Raises:
        ValueError: the mesh has no such axis, or another transform uses it. When called: a sequence's length is no multiple of
            twice the axis's size.

    Cost: for P parameters 2P(N-1)/N elements sent by each rank a step, once, beside what attention sends; 1/N of the activations.

    Source: Jacobs et al., arXiv 2309.14509; Liu et al., arXiv 2310.01889.

    >>> import torch
    >>> import fspeed as fs
    >>> m = fs.mesh(seq=1)
    >>> s = sequence_shard(fs.step(lambda p, x, key: fs.mean(p["w"] * x), fs.optim.sgd(1.)), m)
    >>> s.params(s(s.init({"w": torch.tensor(0.)}), torch.tensor([[1., 3.]]))[0])
    {'w': tensor(-2.)}
    """
    ax = replace(mesh.axis(axis), splits_batch=False)
    part = lambda batch: parts(batch, ax, dim, chooser(leaves))
    weigh = step.weights
    cut = lambda loss: replace(loss, prepare=lambda batch: part(loss.prepare(batch)))
    fields: dict[str, Any] = {} if weigh is None else {"weights": lambda batch: weigh(part(batch))}
    return outside(step, lambda inner: sums(ax)(on_loss(cut)(inner)), axes=over(step, ax), **fields)


def parts(batch: Any, axis: Axis, dim: int, chosen: Callable[[str], bool]) -> Any:
    """This rank's part of the sequences in a batch."""
    leaves, spec = tree_flatten(batch)
    cut = lambda path, x: split_sequence(x, axis, dim) if x.dim() > dim and chosen(path) else x
    return tree_unflatten(spec, map(cut, tree_paths(batch), leaves))


def position_key(key: Key | None, length: int, axis: Axis) -> Key | None:
    """A key whose rows are the positions at hand of all sequences: (rows, length, ...) flattened to (rows * length, ...).

    What it draws for a position depends on no axis: `dropout(position_key(key, length, axis), x.flatten(0, 1), rate)` is the part
    at hand of `dropout(key, whole x, rate)`.

    Args:
        key: a loss's.
        length: of the part at hand.
        axis: the ranks that share sequences.

    >>> import fspeed as fs
    >>> import torch
    >>> key = Key(fs.random.key(0), torch.arange(2))
    >>> part = position_key(key, 2, Axis("seq", 0, 0, 2, None))
    >>> torch.equal(fs.random.uniform_rows(part, (3,)).view(2, 2, 3), fs.random.uniform_rows(key, (4, 3))[:, [0, 3]])
    True
    """
    if key is None:
        return None
    here = positions(length, axis, device=key.rows.device)
    return Key(key.data, (key.rows.unsqueeze(1) * (length * axis.size) + here).flatten())
