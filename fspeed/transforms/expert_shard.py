"""Expert parallelism: experts divided over an axis that also divides the batch."""
from collections.abc import Iterable

from fspeed.shard.mesh import Mesh
from fspeed.step import Step
from fspeed.transforms._slices import sliced


def expert_shard(step: Step, mesh: Mesh, experts: str | Iterable[str], *, axis: str = "expert") -> Step:
    """Same in and out as the step; each rank of the axis has some of the experts, and its own rows of the batch.

    The loss sends tokens to them by `mixture_of_experts` of `fspeed.shard.experts`. Without a capacity it gives the answer of the
    bare step on any split of the batch; what a capacity drops, and the balance loss under `accumulate`, depend on the split.

    Args:
        step: a step.
        mesh: from `fs.mesh`.
        experts: globs over key paths: leaves whose first dim is the expert.
        axis: the mesh axis to divide them over; batches are split along it too.

    Returns:
        A step whose state holds 1/N of the experts, and whose `batch` is this rank's part.

    Raises:
        ValueError: the mesh has no such axis, or another transform uses it. By `init`: a glob matches no leaf, or the ranks do not
            divide the number of experts.

    Cost: for R elements in other leaves and m microbatches a rank sends 2mR(N-1)/N elements a step, in one message for
        each use of a group, beside what `mixture_of_experts` sends.

    Source: Lepikhin et al., arXiv 2006.16668.

    >>> import torch
    >>> import fspeed as fs
    >>> from fspeed.shard.experts import mixture_of_experts
    >>> m = fs.mesh(expert=1)
    >>> mix = lambda p, x: mixture_of_experts(x, p["router"], lambda w, x: x * w, p["w"], m.axis("expert"), k=1).out
    >>> s = expert_shard(fs.step(lambda p, x, key: fs.mean(mix(p, x)), fs.optim.sgd(1.)), m, "w")
    >>> s.init({"router": torch.zeros(2, 1), "w": torch.ones(2, 1, 1)}).params["root"]["w"]
    Piece(tensor([[[1.]],
    <BLANKLINE>
            [[1.]]]), axis='expert' 0/1)
    """
    ax = mesh.axis(axis)
    globs = (experts,) if isinstance(experts, str) else tuple(experts)
    return sliced(step, "expert_shard", ax, dict.fromkeys(globs, (axis,)))
