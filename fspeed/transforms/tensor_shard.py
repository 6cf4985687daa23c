"""Tensor parallelism: large weights divided over an axis along a dim; the loss computes on its slices."""
from collections.abc import Mapping
from dataclasses import replace

from fspeed.shard.mesh import Mesh
from fspeed.step import Step
from fspeed.transforms._slices import sliced


def tensor_shard(step: Step, mesh: Mesh, specs: Mapping[str, tuple[str | None, ...]], *, axis: str = "model") -> Step:
    """Same in and out as the step; named leaves, their gradients and moments are divided over the ranks of an axis.

    The loss sees this rank's slices, and says by the functions of `fspeed.shard.tensor` what they mean; all ranks of the axis pass
    the same batch. Every rank's loss counts, as on any axis, and collectives have their true transposes: so whatever the loss
    computes, on one rank or on all, its gradient is right. It stands inside all other transforms, wherever it is in the stack.

    Args:
        step: a step.
        mesh: from `fs.mesh`.
        specs: a glob over key paths -> of each dim the axis that divides it, or None; dims at the end may be left out. The first
            pattern that matches a leaf counts, names of other axes are left to other transforms, and a leaf without a spec is
            whole on every rank. Tied leaves have one spec.
        axis: the mesh axis to divide over; batches are not split along it.

    Returns:
        A step whose state holds this rank's slices.

    Raises:
        ValueError: when built: a spec names an axis that the mesh has not, or one twice, or none names `axis`; another transform
            uses the axis. By `init`, with the leaf's path: a pattern matches no leaf, a spec has more dims than its leaf, or the
            ranks do not divide a dim, or leaves that are tied have different specs.
        TypeError: a spec is no tuple of names and None.

    Cost: for R elements in whole leaves, T ranks and m microbatches a rank sends 2mR(T-1)/T elements a step, in one message for
        each use of a group that has such leaves, beside what the loss's own functions send. Of a divided leaf it keeps 1/T.

    Source: Shoeybi et al., arXiv 1909.08053; specs as in `jax.sharding.PartitionSpec`.

    >>> import torch
    >>> import fspeed as fs
    >>> from fspeed.shard.tensor import row_parallel_linear
    >>> m = fs.mesh(model=1)
    >>> loss = lambda p, x, key: fs.mean(row_parallel_linear(x, p["w"], m.axis("model")))
    >>> s = tensor_shard(fs.step(loss, fs.optim.sgd(1.)), m, {"w": (None, "model")})
    >>> s.params(s(s.init({"w": torch.zeros(1, 2)}), torch.tensor([[1., 3.]]))[0])
    {'w': tensor([[-1., -3.]])}
    """
    ax = replace(mesh.axis(axis), splits_batch=False)
    known = [a.name for a in mesh.axes]
    for pattern, spec in specs.items():
        if not isinstance(spec, tuple) or not all(name is None or isinstance(name, str) for name in spec):
            raise TypeError(f"tensor_shard: the spec for {pattern!r} must be a tuple of axis names and None, got {spec!r}")
        names = [name for name in spec if name is not None]
        if unknown := set(names) - set(known):
            raise ValueError(f"tensor_shard: the spec for {pattern!r} names axis {min(unknown)!r}, which {mesh} has not")
        if len(set(names)) < len(names):
            raise ValueError(f"tensor_shard: the spec {spec} for {pattern!r} names an axis twice; it divides one dim of a leaf")
    if not any(axis in spec for spec in specs.values()):
        raise ValueError(f"tensor_shard: no spec names axis {axis!r}, so it would divide nothing; got {dict(specs)}")
    return sliced(step, "tensor_shard", ax, specs)
