"""Joining the other processes of a run: who launched this one, what rank it has, and where the others meet."""

import atexit
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Launch:
    """This process's place in a run.

    Args:
        by: who launched it: "torchrun", "Open MPI", "MPICH", "Slurm" or "nobody".
        rank: its number, 0 to world_size - 1.
        world_size: how many processes there are.
        local_rank: its number among those of its machine.
        address, port: where rank 0 listens while they join.

    >>> Launch().world_size
    1
    """

    by: str = "nobody"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, launched by {self.by}"


def init_distributed(*, timeout: float = 600, backend: str | None = None, check: bool = False) -> Launch:
    """Join the other processes of this run, if it has any, and say on rank 0 what was found.

    The rank comes from the variables of torchrun, Open MPI, MPICH (Intel MPI) or Slurm's srun. MASTER_ADDR and MASTER_PORT say
    where rank 0 is; without them it is this machine, or Slurm's first node. Without a launcher there is one process and no
    process group. A second call does nothing.

    Args:
        timeout: seconds, over 0, until a collective that does not complete raises CollectiveError (with NCCL, whose calls cannot be
            interrupted, its watchdog ends the process instead).
        backend: torch's name of what carries the collectives; NCCL for the GPU beside gloo for the CPU, or gloo alone.
        check: compare each collective on all ranks before it starts, and raise CollectiveError saying who called what. gloo on its
            own ends the process when sizes in bytes differ, times out when its algorithms differ, and when only dtypes, shapes or
            reductions differ gives garbage in silence. Costs a round trip a collective and all overlap. The same as setting
            TORCH_DISTRIBUTED_DEBUG=INFO.

    Returns: this process's Launch.
    Raises: ValueError if the launcher's variables do not say where rank 0 is; torch's DistStoreError if ranks are missing.
    Cost: a rendezvous.

    >>> init_distributed().world_size
    1

    Source: `jax.distributed.initialize`, over `torch.distributed.init_process_group`.
    """
    launch = detect(os.environ)
    if dist.is_initialized():
        return Launch(launch.by, dist.get_rank(), dist.get_world_size(), launch.local_rank)
    if check and dist.get_debug_level() == dist.DebugLevel.OFF:
        dist.set_debug_level(dist.DebugLevel.INFO)
    if launch.by == "nobody":
        return launch
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank)
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(
        backend,
        init_method=f"tcp://{launch.address}:{launch.port}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout),
    )
    atexit.register(time.sleep, 0.1)  # time for gloo's threads to let go of the last tensors: later it would abort (pytorch#179291)
    if launch.rank == 0:
        print(f"fspeed: {launch}; {backend} at {launch.address}:{launch.port}, timeout {timeout:g} s", file=sys.stderr)
    return launch


def detect(env: Mapping[str, str]) -> Launch:
    """The Launch that a process's environment variables tell of.

    Args:
        env: the variables.

    Returns: the Launch. MPI's variables go before Slurm's, under which MPI may have been started.
    Raises: ValueError if they do not say where rank 0 is.
    Cost: none.

    >>> print(detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"}))
    rank 1 of 2, launched by torchrun
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return launched("torchrun", env, "RANK", "WORLD_SIZE", env.get("LOCAL_RANK", env["RANK"]), "127.0.0.1")
    if "OMPI_COMM_WORLD_RANK" in env:
        one_machine = env["OMPI_COMM_WORLD_LOCAL_SIZE"] == env["OMPI_COMM_WORLD_SIZE"]
        local_rank, address = env["OMPI_COMM_WORLD_LOCAL_RANK"], "127.0.0.1" if one_machine else ""
        return launched("Open MPI", env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", local_rank, address)
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        address = "127.0.0.1" if env["MPI_LOCALNRANKS"] == env["PMI_SIZE"] else ""
        return launched("MPICH", env, "PMI_RANK", "PMI_SIZE", env["MPI_LOCALRANKID"], address)
    if "SLURM_STEP_NUM_TASKS" in env:  # set by srun; a batch script alone has the other variables, and is one process
        address = first_host(env["SLURM_STEP_NODELIST"])
        port = 20000 + int(env["SLURM_JOB_ID"]) % 10000  # two jobs on one machine must not meet
        return launched("Slurm", env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", env["SLURM_LOCALID"], address, port)
    return Launch()


def launched(by: str, env: Mapping[str, str], rank: str, size: str, local_rank: str, address: str, port: int = 29500) -> Launch:
    address = env.get("MASTER_ADDR", address)
    if not address:
        raise ValueError(f"{by} started ranks on several machines, but does not say where rank 0 is: set MASTER_ADDR")
    return Launch(by, int(env[rank]), int(env[size]), int(local_rank), address, int(env.get("MASTER_PORT", port)))


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: n[03-07,9],m1 -> n03."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]
