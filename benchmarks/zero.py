"""Sharded training over gloo, one thread a rank, against what PyTorch and DeepSpeed have for it, stepped in turn.

DeepSpeed's engines patch torch for the whole process. So each has a job of its own, beside DDP, and ratios are of ratios to DDP.
"""
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import job, on_ranks, ratio
from fspeed.testing.count import Counted

CLAIMS = {
    "dp_vs_ddp": "data parallel on 2 ranks, against DDP: time",
    "z1_vs_zro": "ZeRO-1 on 2 ranks, against ZeroRedundancyOptimizer: time",
    "z2_vs_deepspeed2": "ZeRO-2 on 2 ranks, against DeepSpeed 2: time",
    "z3_vs_deepspeed3": "ZeRO-3 on 2 ranks, against DeepSpeed 3: time",
    "z3_vs_fsdp2": "ZeRO-3 on 2 ranks, against FSDP2: time",
    "z3_peak_vs_fsdp2": "... peak memory",
}
RATIOS = {
    "z3_vs_fsdp2": ("fspeed zero 3", "FSDP2"), "z1_vs_zro": ("fspeed zero 1", "ZeroRedundancyOptimizer"),
    "dp_vs_ddp": ("fspeed data parallel", "DDP"), "z3_vs_ddp": ("fspeed zero 3", "DDP"), "z2_vs_ddp": ("fspeed zero 2", "DDP"),
}


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    rows, ratios = compared(2, quick)
    if not quick:
        more, others = compared(4, quick)
        rows, ratios = rows + more, {**ratios, **{f"{key}_4ranks": value for key, value in others.items()}}
    return rows, ratios


def compared(ranks: int, quick: bool) -> tuple[list[dict], dict[str, float]]:
    """All peers on so many ranks: rows of a table, and ratios."""
    rounds, seconds = (4, 25) if quick else (30, 300)
    wall, cpu, sent = job("benchmarks.zero", "torch", rounds, seconds, ranks=ranks)
    peaks = {name: job("benchmarks.zero", "peak", name, ranks=ranks) for name in ("fspeed zero 3", "FSDP2")}
    row = lambda name, wall, cpu: {
        "what": f"{name}, {ranks} ranks", "ms": statistics.median(wall[name]) * 1e3, "over DDP": ratio(wall, name, "DDP"),
        "CPU over DDP": ratio(cpu, name, "DDP"), "sent / formula": sent.get(name, "-"), "peak MB": peaks.get(name, "-"),
    }
    rows = [row(name, wall, cpu) for name in wall]
    ratios = {key: ratio(wall, a, b) for key, (a, b) in RATIOS.items()}
    ratios["z3_peak_vs_fsdp2"] = peaks["fspeed zero 3"] / peaks["FSDP2"]
    for stage in (2, 3):
        name = f"DeepSpeed {stage}"
        if importlib.util.find_spec("deepspeed") is None:
            rows.append({**dict.fromkeys(rows[0], "-"), "what": f"{name}: not installed, so not compared"})
            continue
        theirs = job("benchmarks.zero", "deepspeed", rounds, seconds / 2, stage, ranks=ranks)
        rows.append(row(name, *theirs))
        ratios[f"z{stage}_vs_deepspeed{stage}"] = ratio(wall, f"fspeed zero {stage}", "DDP") / ratio(theirs[0], name, "DDP")
    return rows, ratios


# ---------------------------------------------------------------- peers
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


def fsdp2(size: gpt.Size, rank: int, low: bool = False, head: bool = False):
    """ZeRO-3; `low`: it gathers, computes and reduces in bfloat16; `head`: the output layer is a unit too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = gpt.module(size), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if low else MixedPrecisionPolicy()
    for block in (*model.blocks, *([model.head] if head else [])):
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    return by_backward(model, torch.optim.AdamW(model.parameters(), fused=True, **gpt.ADAMW), size, rank)


def by_backward(model, optimizer, size: gpt.Size, rank: int):
    def step(i: int) -> torch.Tensor:
        loss = model(*gpt.batch(size, i, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean(loss)

    return step


def deepspeed_zero(stage: int, size: gpt.Size, rank: int):
    """Without clipping, which is its default and none of the others'; with their optimizer, so that it need not compile its own."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = gpt.module(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **gpt.ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": size.batch, "gradient_clipping": 0.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    })

    def step(i: int) -> torch.Tensor:
        loss = engine(*gpt.batch(size, i, rank))
        engine.backward(loss)
        engine.step()
        return mean(loss)

    return step


def mean(loss: torch.Tensor) -> torch.Tensor:
    loss = loss.detach().float()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def fspeed(step: fs.Step, size: gpt.Size, rank: int):
    box = [step.init(gpt.params(size))]

    def run(i: int) -> torch.Tensor:
        new, metrics = step(box.pop(), gpt.batch(size, i, rank))
        box.append(new)
        return metrics["loss"]

    return run


def ours(size: gpt.Size) -> dict[str, fs.Step]:
    step, mesh = fs.donate(gpt.step(size)), fs.mesh(data=-1)
    zero = {f"fspeed zero {stage}": fs.zero_shard(step, mesh, stage=stage) for stage in (1, 2, 3)}
    return {"fspeed data parallel": fs.data_parallel(step, mesh), **zero}


# ---------------------------------------------------------------- what runs on the ranks
def timed_with_torch(rounds: str, seconds: str):
    """Times against PyTorch's own, and what fspeed sends against what its documentation says."""
    rank, size = dist.get_rank(), gpt.Size()
    mine = {name: fspeed(step, size, rank) for name, step in ours(size).items()}
    theirs = {"DDP": ddp(size, rank), "ZeroRedundancyOptimizer": zero_redundancy(size, rank), "FSDP2": fsdp2(size, rank)}
    wall, cpu = on_ranks({**theirs, **mine}, int(rounds), float(seconds), warmup=1 if int(rounds) < 10 else 2)
    return wall, cpu, {name: elements_sent(step, size) / formula(name, size) for name, step in mine.items()}


def elements_sent(step, size: gpt.Size) -> int:
    with Counted(dist.get_world_size(), least=1000) as counted:
        step(0)
    return counted.total


def formula(name: str, size: gpt.Size) -> float:
    """Elements that a rank sends a step."""
    model, n = gpt.module(size), dist.get_world_size()
    layers, last, everything = (sum(p.numel() for p in m.parameters()) for m in (model.blocks, model.blocks[-1], model))
    return (n - 1) / n * (2 * everything + layers - last if name == "fspeed zero 3" else 2 * everything)


def timed_with_deepspeed(rounds: str, seconds: str, stage: str):
    """Times of one of its stages and of DDP, which is kept from the function that ZeRO-3 puts in the place of torch's."""
    linear, size, rank = F.linear, gpt.Size(), dist.get_rank()
    reference, theirs = ddp(size, rank), deepspeed_zero(int(stage), size, rank)
    patched = F.linear

    def unpatched(i: int) -> torch.Tensor:
        F.linear = linear
        try:
            return reference(i)
        finally:
            F.linear = patched

    return on_ranks({"DDP": unpatched, f"DeepSpeed {stage}": theirs}, int(rounds), float(seconds), warmup=1)


def peak(name: str) -> float:
    """The most resident memory of three steps of one peer, alone in its processes, above what was there before: MB."""
    rank, size = dist.get_rank(), gpt.Size()
    dist.barrier()
    start = status("VmRSS")
    step = fsdp2(size, rank) if name == "FSDP2" else fspeed(ours(size)[name], size, rank)
    for i in range(3):
        step(i)
    most = torch.tensor(status("VmHWM") - start)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1e3


def worker(out: str, what: str, *args: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {"torch": timed_with_torch, "deepspeed": timed_with_deepspeed, "peak": peak}[what](*args)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(*sys.argv[1:])
