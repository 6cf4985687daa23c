"""1F1B over gloo, one thread a rank, against torch.distributed.pipelining's, on the same stages and microbatches, in turn."""
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # here: its import takes memory

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import job, on_ranks, ratio
from benchmarks.zero import fspeed, status

CLAIMS = {
    "time_2": "1F1B on 2 ranks, against torch.distributed.pipelining's: time",
    "peak_2": "... peak memory",
    "time_4": "... on 4 ranks: time",
}
OURS, THEIRS = "fspeed 1F1B", "torch 1F1B"
SIZE = gpt.Size(batch=8)
MICROBATCHES = 8
CUTS = {2: [5], 4: [3, 5, 7]}       # the first part of each stage, of embedding, 6 blocks, and the head, which costs two blocks


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    rows, ratios = [], {}
    for ranks in (2, 4):
        wall, cpu = job("benchmarks.pipeline", "timed", *((4, 20) if quick else (30, 240)), ranks=ranks)
        peaks = {name: job("benchmarks.pipeline", "peak", name, ranks=ranks) for name in wall}
        rows += [{
            "what": f"{name}, {ranks} ranks", "ms": statistics.median(wall[name]) * 1e3, "over torch": ratio(wall, name, THEIRS),
            "CPU over torch": ratio(cpu, name, THEIRS), "peak MB": peaks[name],
        } for name in wall]
        ratios |= {f"time_{ranks}": ratio(wall, OURS, THEIRS), f"peak_{ranks}": peaks[OURS] / peaks[THEIRS]}
    return rows, ratios


# ---------------------------------------------------------------- peers
def ours():
    """The GPT of benchmarks/gpt.py as a sequence of parts."""
    norm = lambda p, x: F.layer_norm(x, (SIZE.d,), p["weight"], p["bias"])

    def embed(ps, x, batch, key):
        tok, pos = ps
        return F.embedding(batch[0], tok["weight"]) + pos["weight"]

    def head(ps, x, batch, key):
        ln, out = ps
        return F.cross_entropy(F.linear(norm(ln, x), out["weight"]).flatten(0, 1), batch[1].flatten())

    block = lambda p, x, batch, key: gpt.block(SIZE)(p, x)
    blocks = [(f"blocks/{i}", block) for i in range(SIZE.layers)]
    loss = fs.sequential([(["tok", "pos"], embed), *blocks, (["ln", "head"], head)])
    (b1, b2), rest = gpt.ADAMW["betas"], {k: v for k, v in gpt.ADAMW.items() if k not in ("lr", "betas")}
    step = fs.donate(fs.step(loss, fs.optim.adamw(gpt.ADAMW["lr"], b1=b1, b2=b2, **rest), layers=loss.names))
    return fspeed(fs.pipeline(step, fs.mesh(pipe=-1), microbatches=MICROBATCHES, cuts=CUTS[dist.get_world_size()]), SIZE, 0)


class Embedding(nn.Module):
    def __init__(self, model: gpt.GPT):
        super().__init__()
        self.tok, self.pos = model.tok, model.pos

    def forward(self, tokens):
        return self.tok(tokens) + self.pos.weight


def theirs():
    rank, ranks, model = dist.get_rank(), dist.get_world_size(), gpt.module(SIZE)
    parts = [Embedding(model), *model.blocks, nn.Sequential(model.ln, model.head)]
    start, stop = list(itertools.pairwise([0, *CUTS[ranks], len(parts)]))[rank]
    mine = nn.Sequential(*parts[start:stop])
    stage = PipelineStage(mine, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    optimizer = torch.optim.AdamW(mine.parameters(), fused=True, **gpt.ADAMW)

    def step(i: int) -> torch.Tensor:
        x, y = gpt.batch(SIZE, i)
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == ranks - 1 else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, ranks - 1)
        return loss

    return step


PEERS = {THEIRS: theirs, OURS: ours}


# ---------------------------------------------------------------- what runs on the ranks
def timed(rounds: str, seconds: str):
    peers = {name: make() for name, make in PEERS.items()}
    return on_ranks(peers, int(rounds), float(seconds), warmup=1 if int(rounds) < 10 else 2)


def peak(name: str) -> float:
    """The most resident memory of three steps of one peer, alone in its processes, above what was there before: MB."""
    dist.barrier()
    start = status("VmRSS")
    step = PEERS[name]()
    for i in range(3):
        step(i)
    most = torch.tensor(status("VmHWM") - start)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def worker(out: str, what: str, *args: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {"timed": timed, "peak": peak}[what](*args)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(*sys.argv[1:])
