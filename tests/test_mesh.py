"""Meshes: the grid's arithmetic, groups that other systems made, and how a process finds its place in a run."""

import contextlib
import io
import itertools
import math
import os
import socket

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fspeed.shard.collectives import all_gather, psum
from fspeed.shard.launch import Launch, detect, init_distributed
from fspeed.shard.mesh import Axis, infer_sizes, mesh
from fspeed.shard.wire import CollectiveError
from fspeed.testing import pool
from fspeed.testing.pool import Pool, RankError, ranks

# ---- sizes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_one_size_is_worked_out(sizes: list[int], data: st.DataObject) -> None:
    full = {f"axis{i}": size for i, size in enumerate(sizes)}
    world = math.prod(sizes)
    left_out = data.draw(st.sampled_from(list(full)))
    assert infer_sizes(full, world) == full
    inferred = infer_sizes({**full, left_out: -1}, world)
    assert list(inferred.items()) == list(full.items())


@pytest.mark.parametrize(
    "sizes, world, why",
    [
        ({"data": 2}, 1, "mesh(data=2) has 2 ranks, but this run has 1"),
        ({"data": -1, "model": 2}, 3, "mesh(data=-1, model=2) has a multiple of 2 ranks, but this run has 3"),
        ({"data": 2, "model": 2}, 8, "mesh(data=2, model=2) has 4 ranks, but this run has 8"),
        ({"data": -1, "model": -1}, 4, "at most one is -1"),
        ({"data": 0}, 4, "sizes are positive"),
        ({"data": -2, "model": -2}, 4, "sizes are positive"),
        ({}, 2, "mesh() has 1 ranks, but this run has 2"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], world: int, why: str) -> None:
    with pytest.raises(ValueError) as raised:
        infer_sizes(sizes, world)
    assert why in str(raised.value)


# ---- one process


def test_one_process_needs_no_launcher_and_no_group() -> None:
    m = mesh(data=-1, model=1)
    assert m.axes == (Axis("data", 0, 0, 1, None), Axis("model", 1, 0, 1, None))
    assert str(m) == "mesh(data=1, model=1)"
    assert m.device_mesh is None
    assert not dist.is_initialized()
    assert torch.equal(psum(torch.arange(3), m.axis("data")), torch.arange(3))
    with pytest.raises(ValueError, match=r"no axis 'pipe' in mesh\(data=1, model=1\)"):
        m.axis("pipe")


def test_meshes_and_axes_are_static_data() -> None:
    assert mesh(data=1) == mesh(data=1) != mesh(model=1)
    assert len({mesh(data=1), mesh(data=1)}) == 1
    assert len({Axis("a", 0, 0, 2, "g"), Axis("a", 0, 0, 2, "g"), Axis("a", 0, 1, 2, "g")}) == 2
    axis = mesh(data=1).axis("data")
    leaves, spec = torch.utils._pytree.tree_flatten({"x": 1, "axis": axis})
    assert torch.utils._pytree.tree_unflatten(leaves, spec) == {"x": 1, "axis": axis}


def test_a_launcher_without_init_distributed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would train alone, in silence."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"rank 1 of 4, launched by torchrun, but has not joined .* call init_distributed"):
        mesh(data=-1)


# ---- many ranks


@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 2}, {"a": 1, "b": 4}, {"a": 2, "b": 1, "c": -1}])
def test_ranks_are_counted_off_with_the_last_axis_fastest(sizes: dict[str, int]) -> None:
    def on_rank() -> tuple:
        m = pool.mesh(**sizes)
        lines = [all_gather(torch.tensor([dist.get_rank()]), axis).tolist() for axis in m.axes]
        return [(axis.name, axis.dim, axis.rank, axis.size) for axis in m.axes], lines, m.device, str(m)

    full = {**sizes, "c": 2} if "c" in sizes else sizes
    places = list(itertools.product(*map(range, full.values())))
    for rank, (axes, lines, device, text) in enumerate(ranks(4)(on_rank)):
        assert axes == [(name, dim, places[rank][dim], size) for dim, (name, size) in enumerate(full.items())]
        for dim, line in enumerate(lines):  # the ranks that differ from this one along the axis alone
            assert line == [r for r, p in enumerate(places) if all(p[d] == places[rank][d] for d in range(len(p)) if d != dim)]
        assert device == "cpu"
        assert text == f"mesh({', '.join(f'{k}={v}' for k, v in full.items())})"


def test_sizes_must_multiply_to_the_world() -> None:
    def on_rank() -> str:
        with pytest.raises(ValueError) as raised:
            mesh(data=3)
        return str(raised.value)

    assert ranks(2)(on_rank) == ["mesh(data=3) has 3 ranks, but this run has 2"] * 2


def test_groups_of_an_axis_have_the_timeout_of_the_default_group() -> None:
    """torch would give them 30 minutes."""

    def on_rank() -> None:
        axis = pool.mesh(a=2, b=2).axis("b")
        if axis.rank == 0:
            psum(torch.ones(1), axis)

    with Pool(4, timeout=1) as four, pytest.raises(RankError, match="psum over axis 'b' failed on its rank 0 of 2") as raised:
        four(on_rank, timeout=20)
    assert isinstance(raised.value.__cause__, CollectiveError)


def test_groups_that_another_system_made() -> None:
    def on_rank() -> list:
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rank = dist.get_rank()
        m = mesh.from_groups({"model": rows[rank // 2], "data": columns[rank % 2], "pipe": None})
        assert [axis.size for axis in m.axes] == [2, 2, 1]
        errors = []
        for bad in [
            {"model": rows[rank // 2], "data": rows[rank // 2]},
            {"model": rows[rank // 2], "world": dist.group.WORLD},
            {"model": rows[1 - rank // 2]},
        ]:
            try:
                mesh.from_groups(bad)
            except ValueError as error:
                errors.append(str(error))
        return [str(m), [all_gather(torch.tensor([rank]), axis).tolist() for axis in m.axes], errors]

    with Pool(4) as four:
        for rank, (text, lines, errors) in enumerate(four(on_rank)):
            assert text == "mesh(model=2, data=2, pipe=1)"
            row = [rank // 2 * 2, rank // 2 * 2 + 1]
            assert lines == [row, [rank % 2, rank % 2 + 2], [rank]]
            assert len(errors) == 3
            assert f"'model' and 'data' share rank {row[1 - rank % 2]}" in errors[0]
            assert "'model' and 'world' share rank" in errors[1]
            assert "this rank is not in the group of axis 'model'" in errors[2]


# ---- launching

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"}
BATCH = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[3-4]"}
SRUN = {**BATCH, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n[03-06,9],m1"}


@pytest.mark.parametrize(
    "env, launch",
    [
        ({}, Launch()),
        (TORCHRUN, Launch("torchrun", 3, 8, 1, "n0", 1234)),
        (OPENMPI, Launch("Open MPI", 3, 8, 3, "127.0.0.1", 29500)),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "n0"}, Launch("Open MPI", 3, 8, 3, "n0", 29500)),
        (MPICH, Launch("MPICH", 3, 8, 3, "127.0.0.1", 29500)),
        (SRUN, Launch("Slurm", 3, 8, 1, "n03", 23456)),
        ({**SRUN, "SLURM_STEP_NODELIST": "rack[2-3]n[07,09]"}, Launch("Slurm", 3, 8, 1, "rack2n07", 23456)),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu-a,gpu-b"}, Launch("Slurm", 3, 8, 1, "gpu-a", 23456)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "8"}, Launch("Slurm", 3, 8, 1, "n03", 23456)),  # srun --mpi=pmi2
        (BATCH, Launch()),  # the batch script itself, without srun
        ({**SRUN, **OPENMPI}, Launch("Open MPI", 3, 8, 3, "127.0.0.1", 29500)),  # mpirun in a Slurm job
        ({**SRUN, **TORCHRUN}, Launch("torchrun", 3, 8, 1, "n0", 1234)),  # torchrun under srun
    ],
)
def test_the_launcher_is_read_off_the_environment(env: dict[str, str], launch: Launch) -> None:
    assert detect(env) == launch


@pytest.mark.parametrize("env", [{**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {**MPICH, "MPI_LOCALNRANKS": "4"}])
def test_several_machines_need_an_address(env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        detect(env)


def test_without_a_launcher_there_is_one_process_and_no_group() -> None:
    assert init_distributed() == Launch()
    assert not dist.is_initialized()


def test_ranks_join_each_other_and_say_so_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def on_rank() -> tuple:
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with contextlib.redirect_stderr(io.StringIO()) as said:
            first = init_distributed(timeout=1, check=True)
            again = init_distributed()
        axis = mesh(data=-1).axis("data")
        total = psum(torch.ones(1), axis).item()
        try:
            psum(torch.ones(1 + rank), axis)
        except CollectiveError as error:
            return (first, again.rank, again.world_size), total, said.getvalue(), str(error)
        return ()

    with Pool(2) as two:
        for rank, (launch, total, said, error) in enumerate(two(on_rank, timeout=30)):
            assert launch == (Launch("torchrun", rank, 2, rank, "127.0.0.1", port), rank, 2)
            assert total == 2
            line = f"fspeed: rank 0 of 2, launched by torchrun; gloo at 127.0.0.1:{port}, timeout 1 s\n"
            assert said == (line if rank == 0 else "")
            assert "made different calls" in error
