"""A mesh: the ranks as a grid, whose axes have names. All that a collective needs to know of an axis is one small record."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .launch import detect


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh, as this rank sees it: static and hashable, so it may stand in a pytree's structure.

    Args:
        name: what the mesh calls it.
        dim: its position in the mesh, 0 being the most significant.
        rank: this rank's place along it, 0 to size - 1.
        size: how many ranks lie along it.
        group: torch's name of the process group of those ranks; None when size is 1.
        splits_batch: whether ranks along it see different rows of the batch.

    Cost: none.

    >>> Axis("data", dim=0, rank=0, size=1, group=None)
    Axis(name='data', dim=0, rank=0, size=1, group=None, splits_batch=True)
    """

    name: str
    dim: int
    rank: int
    size: int
    group: str | None
    splits_batch: bool = True


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid with named axes; made by `mesh` or `mesh.from_groups`.

    Args:
        axes: the axes, the most significant first.
        device: "cuda" or "cpu", whichever the process groups carry tensors of.
        device_mesh: torch's own mesh of the axes longer than 1, for DTensor; None when there is none.

    Cost: none.

    >>> mesh(data=1, model=1).axis("model").dim
    1
    """

    axes: tuple[Axis, ...]
    device: str
    device_mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    def axis(self, name: str) -> Axis:
        """The axis of that name; ValueError, with the names there are, if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ValueError(f"no axis {name!r} in {self}")

    def __str__(self) -> str:
        return f"mesh({shape_text({axis.name: axis.size for axis in self.axes})})"


def mesh(**sizes: int) -> Mesh:
    """The ranks of this run as a grid: rank = sum over axes of index x (product of the later sizes).

    Without `init_distributed` there is one rank, and every size is 1. Each axis longer than 1 and shorter than the world
    makes new process groups (the same on all ranks, so all call this), which fail after the default group's timeout.

    Args:
        sizes: the size of each axis, in order, the most significant first; one may be -1 and is worked out.

    Returns: the Mesh, with this rank's place in it.
    Raises: ValueError if the sizes are not positive or do not multiply to the number of ranks; RuntimeError if a launcher started
        several ranks and `init_distributed` was not called.
    Cost: a rendezvous through the store for each group made; call it once.

    >>> m = mesh(data=-1, model=1)
    >>> print(m, m.axis("data").size)
    mesh(data=1, model=1) 1

    Source: `jax.make_mesh`, over `torch.distributed.device_mesh`.
    """
    sizes = infer_sizes(sizes, world_size())
    device = group_device()
    longer = {name: size for name, size in sizes.items() if size > 1}
    device_mesh = init_device_mesh(device, tuple(longer.values()), mesh_dim_names=tuple(longer)) if longer else None
    axes = []
    for dim, (name, size) in enumerate(sizes.items()):
        group = None if device_mesh is None or size == 1 else device_mesh.get_group(name)
        if group is not None:
            inherit_timeout(group)
        axes.append(axis_of(name, dim, group))
    return Mesh(tuple(axes), device, device_mesh)


def from_groups(groups: Mapping[str, ProcessGroup | None]) -> Mesh:
    """A mesh of process groups that another system made, for example Megatron's.

    Args:
        groups: name -> the process group of the ranks along that axis, in any order, the most significant first; None for
            an axis of size 1. They need not cover the world.

    Returns: the Mesh, with this rank's place in it.
    Raises: ValueError if this rank is not in a group, or two groups share more than this rank. Only what this rank can see is
        checked: that other ranks pass groups of the same names, sizes and order is for the caller to see to.
    Cost: none; nothing is sent.

    >>> print(from_groups({"data": None, "model": None}))
    mesh(data=1, model=1)
    """
    axes = tuple(axis_of(name, dim, group) for dim, (name, group) in enumerate(groups.items()))
    members = {name: set(dist.get_process_group_ranks(group)) for name, group in groups.items() if group is not None}
    seen: dict[int, str] = {}
    for name, ranks in members.items():
        for rank in ranks - {dist.get_rank()}:
            if rank in seen:
                raise ValueError(f"the groups of axes {seen[rank]!r} and {name!r} share rank {rank}: not axes of one mesh")
            seen[rank] = name
    return Mesh(axes, group_device())


mesh.from_groups = from_groups  # type: ignore[attr-defined]


def axis_of(name: str, dim: int, group: ProcessGroup | None) -> Axis:
    if group is None or dist.get_world_size(group) == 1:
        return Axis(name, dim, rank=0, size=1, group=None)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"this rank is not in the group of axis {name!r}, whose ranks are {dist.get_process_group_ranks(group)}")
    return Axis(name, dim, rank, dist.get_world_size(group), group.group_name)


def world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    launch = detect(os.environ)
    if launch.world_size > 1:
        raise RuntimeError(f"this process is {launch}, but has not joined the others: call init_distributed() first")
    return 1


def infer_sizes(sizes: dict[str, int], world: int) -> dict[str, int]:
    """The sizes with the -1 worked out, which multiply to world."""
    text = f"mesh({shape_text(sizes)})"
    open_names = [name for name, size in sizes.items() if size == -1]
    if len(open_names) > 1 or any(size < 1 for name, size in sizes.items() if name not in open_names):
        raise ValueError(f"{text}: sizes are positive, and at most one is -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_names and world % known == 0:
        return {**sizes, open_names[0]: world // known}
    if open_names or known != world:
        raise ValueError(f"{text} has {'a multiple of ' if open_names else ''}{known} ranks, but this run has {world}")
    return sizes


def group_device() -> str:
    """The kind of device whose tensors the default group carries, the GPU first."""
    if not dist.is_initialized():
        return "cuda" if torch.cuda.is_available() else "cpu"
    kinds = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    return "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"


def inherit_timeout(group: ProcessGroup) -> None:
    """Give a new group the default group's timeout: torch gives it 30 minutes."""
    default = dist.group.WORLD
    for device in group._device_types:
        backend = group._get_backend(device)
        if group is not default and hasattr(backend, "options"):
            backend._set_default_timeout(default._get_backend(device).options._timeout)  # type: ignore[union-attr]


def shape_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
