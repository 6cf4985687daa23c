"""Data parallelism: parameters are whole on every rank, gradients are summed once a step."""
from fspeed.shard.mesh import Mesh
from fspeed.step import Step, outside, over
from fspeed.transforms._sums import sums


def data_parallel(step: Step, mesh: Mesh, *, axis: str = "data") -> Step:
    """Same in and out as the step; each rank of the axis takes its own rows of the batch.

        g = sum over ranks of g_rank

    Args:
        step: a step.
        mesh: from `fs.mesh`.
        axis: the mesh axis along which batches are split.

    Returns:
        A step whose `batch` is this rank's part of the whole batch; parts may be uneven, and a rank may have none.

    Raises:
        ValueError: the mesh has no such axis, or another transform of the step uses it.

    Cost: 2P(N-1)/N elements sent by each rank a step, once, whatever else is in the stack; parameters whole on every rank.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.shard.mesh import mesh
    >>> from fspeed.step import step
    >>> s = data_parallel(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)), mesh(data=1))
    >>> s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 3.]))[0].step
    tensor(1)
    """
    ax = mesh.axis(axis)

    return outside(step, sums(ax), axes=over(step, ax))
