"""Tensor parallelism on two ranks over gloo, one thread a rank, against torch's `parallelize_module`, stepped in turn."""
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import job, on_ranks, ratio
from fspeed.functional import nested
from fspeed.shard import tensor
from fspeed.transforms.tensor_shard import tensor_shard

CLAIMS = {"time": "tensor parallel on 2 ranks, against torch's parallelize_module: time"}
OURS, TORCH = "fspeed tensor_shard", "parallelize_module"
SPECS = {
    "tok/weight": ("model",), "head/weight": ("model",),
    "blocks/*/[qkvu]/weight": ("model",), "blocks/*/[od]/weight": (None, "model"),
}


@dataclass(frozen=True)
class Size(gpt.Size):
    """GPT-2 in miniature, without biases."""
    layers: int = 4


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    wall, cpu = job("benchmarks.tensor", *((6, 25) if quick else (30, 100)), ranks=2)
    rows = [
        {"what": name, "ms": statistics.median(wall[name]) * 1e3, "over torch": ratio(wall, name, TORCH),
         "CPU over torch": ratio(cpu, name, TORCH)}
        for name in wall
    ]
    return rows, {"time": ratio(wall, OURS, TORCH)}


# ---------------------------------------------------------------- the model, as a module and as a loss
class Block(nn.Module):
    def __init__(self, s: Size):
        super().__init__()
        self.width = s.d // s.heads
        self.ln1, self.ln2 = nn.LayerNorm(s.d), nn.LayerNorm(s.d)
        for name, (rows, columns) in dict(q=(1, 1), k=(1, 1), v=(1, 1), o=(1, 1), u=(4, 1), d=(1, 4)).items():
            setattr(self, name, nn.Linear(columns * s.d, rows * s.d, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        n = self.ln1(x)
        q, k, v = (part(n).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.d(F.gelu(self.u(self.ln2(x))))


class GPT(nn.Module):
    """forward(tokens) -> logits."""

    def __init__(self, s: Size):
        super().__init__()
        torch.manual_seed(0)
        self.tok, self.blocks = nn.Embedding(s.vocab, s.d), nn.ModuleList(Block(s) for _ in range(s.layers))
        self.ln, self.head = nn.LayerNorm(s.d), nn.Linear(s.d, s.vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def loss(size: Size, axis):
    norm = lambda p, x: F.layer_norm(x, (size.d,), p["weight"], p["bias"])

    @fs.layer
    def block(p, x):
        weights = (p[name]["weight"] for name in "qkvo")
        x = x + tensor.parallel_attention(norm(p["ln1"], x), *weights, axis, head_dim=size.d // size.heads)
        h = F.gelu(tensor.column_parallel_linear(norm(p["ln2"], x), p["u"]["weight"], axis))
        return x + tensor.row_parallel_linear(h, p["d"]["weight"], axis)

    def run(p, batch, key):
        tokens, targets = batch
        x = tensor.vocab_parallel_embedding(tokens, p["tok"]["weight"], axis)
        for layer in p["blocks"]:
            x = block(layer, x)
        logits = tensor.column_parallel_linear(norm(p["ln"], x), p["head"]["weight"], axis)
        return fs.mean(tensor.vocab_parallel_cross_entropy(logits, targets, axis))

    return run


# ---------------------------------------------------------------- peers
def ours(size: Size):
    mesh = fs.mesh(model=2)
    (b1, b2), rest = gpt.ADAMW["betas"], {k: v for k, v in gpt.ADAMW.items() if k not in ("lr", "betas")}
    step = fs.step(loss(size, mesh.axis("model")), fs.optim.adamw(gpt.ADAMW["lr"], b1=b1, b2=b2, **rest), layers="blocks/*")
    step = fs.donate(tensor_shard(step, mesh, SPECS))
    box = [step.init(nested({name: p.detach() for name, p in GPT(size).named_parameters()}))]

    def run(i: int) -> Tensor:
        state, metrics = step(box.pop(), gpt.batch(size, i))
        box.append(state)
        return metrics["loss"]

    return run


def torchs(size: Size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    model, mesh = GPT(size), init_device_mesh("cpu", (2,))
    plan = {"tok": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    for i in range(size.layers):
        plan.update({f"blocks.{i}.{name}": ColwiseParallel() for name in "qkvu"})
        plan.update({f"blocks.{i}.{name}": RowwiseParallel() for name in "od"})
    model = parallelize_module(model, mesh, plan)
    divided, whole = ([p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False))
    optimizer = torch.optim.AdamW([{"params": divided}, {"params": whole}], fused=True, **gpt.ADAMW)

    def run(i: int) -> Tensor:
        tokens, targets = gpt.batch(size, i)
        with loss_parallel():
            total = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.full_tensor() if isinstance(total, DTensor) else total.detach()

    return run


def worker(out: str, rounds: str, seconds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = Size()
    result = on_ranks({TORCH: torchs(size), OURS: ours(size)}, int(rounds), float(seconds))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(*sys.argv[1:])
