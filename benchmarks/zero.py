"""Sharded training on two ranks over gloo, one thread each, against what PyTorch has for it; all in one job, stepped in turn."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import agree, interleaved, ratio

RANKS = 2
RATIOS = {
    "z3_vs_fsdp2": ("fspeed zero 3", "FSDP2"), "z1_vs_zro": ("fspeed zero 1", "ZeroRedundancyOptimizer"),
    "dp_vs_ddp": ("fspeed data parallel", "DDP"), "z3_vs_ddp": ("fspeed zero 3", "DDP"), "z2_vs_ddp": ("fspeed zero 2", "DDP"),
}


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                "-m", "benchmarks.zero", str(out), "10" if quick else "40",
            ],
            check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        rows, ratios = json.loads(out.read_text())
        return rows, ratios


def ddp(size: gpt.Size, rank: int):
    model = torch.nn.parallel.DistributedDataParallel(gpt.module(size), gradient_as_bucket_view=True)
    return by_backward(model, torch.optim.AdamW(model.parameters(), fused=True, **gpt.ADAMW), size, rank)


def zero_redundancy(size: gpt.Size, rank: int):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(gpt.module(size), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, fused=True, parameters_as_bucket_view=True, **gpt.ADAMW
    )
    return by_backward(model, optimizer, size, rank)


def fsdp2(size: gpt.Size, rank: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = gpt.module(size), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return by_backward(model, torch.optim.AdamW(model.parameters(), fused=True, **gpt.ADAMW), size, rank)


def by_backward(model, optimizer, size: gpt.Size, rank: int):
    def step(i: int) -> torch.Tensor:
        loss = model(*gpt.batch(size, i, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / RANKS

    return step


def fspeed(step: fs.Step, size: gpt.Size, rank: int):
    box = [step.init(gpt.params(size))]

    def run(i: int) -> torch.Tensor:
        new, metrics = step(box.pop(), gpt.batch(size, i, rank))
        box.append(new)
        return metrics["loss"]

    return run


def worker(out: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), gpt.Size()
    mesh = fs.mesh(data=-1)
    step = fs.donate(gpt.step(size))
    ours = {"data parallel": fs.data_parallel(step, mesh), **{f"zero {k}": fs.zero_shard(step, mesh, stage=k) for k in (1, 2, 3)}}
    peers = {
        "DDP": ddp(size, rank), "ZeroRedundancyOptimizer": zero_redundancy(size, rank), "FSDP2": fsdp2(size, rank),
        **{f"fspeed {name}": fspeed(s, size, rank) for name, s in ours.items()},
    }
    cpu, wall, losses = interleaved(peers, rounds, before=dist.barrier)
    agree(losses, 1e-4)
    for times, how in ((wall, dist.ReduceOp.MAX), (cpu, dist.ReduceOp.SUM)):        # the slowest rank's; all ranks' work
        for name, seen in times.items():
            t = torch.tensor(seen, dtype=torch.float64)
            dist.all_reduce(t, how)
            times[name] = t.tolist()
    if rank == 0:
        rows = [{
            "what": name, "ms": statistics.median(wall[name]) * 1e3, "over DDP": ratio(wall, name, "DDP"),
            "CPU ms": statistics.median(cpu[name]) * 1e3, "CPU over DDP": ratio(cpu, name, "DDP"),
        } for name in peers]
        ratios = {key: ratio(wall, a, b) for key, (a, b) in RATIOS.items()}
        Path(out).write_text(json.dumps((rows, ratios)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]))
