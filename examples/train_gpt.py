"""Train a small byte-level GPT on English text that every Python carries, on one process or on many.

The text is the language reference, `pydoc_data.topics`, and its last tenth is held out. The line to beat is a bigram model, which
knows only which byte tends to follow which, fitted on the same nine tenths. The losses do not depend on how many processes there
are, nor, in float32, on the transforms that are chosen.

two commands to begin with:

  python examples/train_gpt.py
      A few minutes on two cores: a progress bar, the held-out loss, a sample, and the loss curve in train_gpt.png.

  torchrun --nproc-per-node 2 examples/train_gpt.py --zero 3 --bf16 --checkpoint --accumulate 4
      The same on two processes, each with half of the batch and half of all parameters, gradients and moments.
"""
import argparse
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import fspeed as fs
from fspeed.shard.mesh import Mesh
from fspeed.shard.pytree import tree_map

BYTES, CONTEXT, WIDTH, DEPTH, HEAD = 256, 128, 128, 4, 32
PROMPT = "The "

# Shapes: B rows of a batch, T time, D width, H heads, K width of a head, V bytes


# ---------------------------------------------------------------- the model
def init(key: torch.Tensor) -> dict:
    keys = iter(fs.random.split(key, 4 * DEPTH + 1))
    normal = lambda *shape, std: std * fs.random.normal(next(keys), shape)
    block = lambda: {
        "norm1": torch.ones(WIDTH),
        "qkv": normal(3 * WIDTH, WIDTH, std=WIDTH**-0.5),
        "out": normal(WIDTH, WIDTH, std=(2 * DEPTH * WIDTH) ** -0.5),
        "norm2": torch.ones(WIDTH),
        "up": normal(4 * WIDTH, WIDTH, std=WIDTH**-0.5),
        "down": normal(WIDTH, 4 * WIDTH, std=(2 * DEPTH * 4 * WIDTH) ** -0.5),
    }
    return {"embed": normal(BYTES, WIDTH, std=0.02), "blocks": [block() for _ in range(DEPTH)], "norm": torch.ones(WIDTH)}


@fs.layer
def block(p, x_BTD, key, dropout):
    drop = lambda i, x: fs.random.dropout(key and key.fold_in(i), x, dropout)
    h_BTD = F.layer_norm(x_BTD, (WIDTH,), p["norm1"])
    q_BHTK, k_BHTK, v_BHTK = rearrange(F.linear(h_BTD, p["qkv"]), "b t (qkv h k) -> qkv b h t k", qkv=3, k=HEAD)
    h_BHTK = F.scaled_dot_product_attention(rotary(q_BHTK), rotary(k_BHTK), v_BHTK, is_causal=True)
    x_BTD = x_BTD + drop(0, F.linear(rearrange(h_BHTK, "b h t k -> b t (h k)"), p["out"]))
    h_BTD = F.layer_norm(x_BTD, (WIDTH,), p["norm2"])
    return x_BTD + drop(1, F.linear(F.gelu(F.linear(h_BTD, p["up"]), approximate="tanh"), p["down"]))


def rotary(x_BHTK):
    """Positions: each pair of features turned by an angle that grows with time."""
    time_T, frequency_K = torch.arange(x_BHTK.shape[-2]), 10000 ** -torch.linspace(0, 1, HEAD // 2)
    angle_TK = torch.outer(time_T, frequency_K).to(x_BHTK.device)
    sin_TK, cos_TK = angle_TK.sin().to(x_BHTK.dtype), angle_TK.cos().to(x_BHTK.dtype)
    a_BHTK, b_BHTK = x_BHTK.chunk(2, -1)
    return torch.cat([a_BHTK * cos_TK - b_BHTK * sin_TK, a_BHTK * sin_TK + b_BHTK * cos_TK], -1)


def gpt(params, bytes_BT, key=None, dropout=0.0):
    x_BTD = F.embedding(bytes_BT, params["embed"])
    for i, p in enumerate(params["blocks"]):
        x_BTD = block(p, x_BTD, key and key.fold_in(i), dropout)
    return F.linear(F.layer_norm(x_BTD, (WIDTH,), params["norm"]), params["embed"])


def loss(params, text_BT, key, *, dropout):
    text_BT = text_BT.long()
    logits_BTV = gpt(params, text_BT[:, :-1], key, dropout)
    return fs.mean(F.cross_entropy(logits_BTV.flatten(0, 1), text_BT[:, 1:].flatten(), reduction="none"))


@torch.no_grad()
def sample(params, prompt: str, length: int, key, temperature=0.7) -> str:
    text_BT = torch.tensor([list(prompt.encode())], device=params["norm"].device)
    for i in range(length):
        logits_V = gpt(params, text_BT[:, -CONTEXT:])[0, -1]
        byte = fs.random.categorical(fs.random.fold_in(key, i).to(logits_V.device), logits_V / temperature)
        text_BT = torch.cat([text_BT, byte.view(1, 1)], 1)
    text = bytes(text_BT[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)         # no escape codes to the terminal


# ---------------------------------------------------------------- the data
def load() -> tuple[torch.Tensor, torch.Tensor]:
    """The text, uint8: what is trained on, and its last tenth, held out, cut into pieces of CONTEXT + 1 bytes."""
    text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.uint8)
    train, held_out = text.tensor_split([len(text) * 9 // 10])
    return train, held_out.unfold(0, CONTEXT + 1, CONTEXT)


def pieces(train: torch.Tensor, count: int, key: torch.Tensor) -> torch.Tensor:
    """Random pieces of CONTEXT + 1 bytes, a function of the key only: every rank draws the same and takes its rows."""
    every_BT = train.unfold(0, CONTEXT + 1, 1)
    return every_BT[fs.random.randint(key, (count,), 0, len(every_BT))]


def bigram_loss(train: torch.Tensor, held_out_BT: torch.Tensor) -> float:
    """Nats a byte of a bigram model fitted on the training text, with a tenth of a count added to each pair."""
    counts_VV = torch.bincount(BYTES * train[:-1].long() + train[1:], minlength=BYTES**2).view(BYTES, BYTES) + 0.1
    log_p_VV = (counts_VV / counts_VV.sum(1, keepdim=True)).log()
    return -log_p_VV[held_out_BT[:, :-1].long(), held_out_BT[:, 1:].long()].mean().item()


# ---------------------------------------------------------------- the step
def stack(o: argparse.Namespace, mesh: Mesh, schedule: Callable) -> fs.Step:
    """(state, batch) -> (state, metrics), by the options."""
    matrices = lambda params: tree_map(lambda x: x.ndim == 2, params)
    adamw = fs.optim.adamw(schedule, b2=0.99, weight_decay=0.1, mask=matrices)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), adamw)

    step = fs.step(partial(loss, dropout=o.dropout), optimizer, layers="blocks/*")
    step = fs.checkpoint(step) if o.checkpoint else step
    step = fs.zero_shard(step, mesh, stage=o.zero) if o.zero else fs.data_parallel(step, mesh)
    step = fs.accumulate(step, o.accumulate)
    step = fs.mixed_precision(step, torch.bfloat16) if o.bf16 else step
    return fs.donate(step)


# ---------------------------------------------------------------- the run
def main(o: argparse.Namespace) -> None:
    fs.init_distributed()
    mesh = fs.mesh(data=-1)
    ranks = mesh.axis("data")
    if ranks.size > 1:
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))))
    if o.save and not o.resume and fs.latest(o.save):
        raise SystemExit(f"{o.save} has checkpoints: go on from the last with --resume, or save to another folder")

    train, held_out = load()
    bigram = bigram_loss(train, held_out)
    init_key, data_key, step_key, sample_key = fs.random.split(fs.random.key(o.seed), 4)

    schedule = fs.optim.warmup_cosine_decay_schedule(o.lr / 10, o.lr, o.steps // 10, o.steps, o.lr / 20)
    step = stack(o, mesh, schedule)
    state = step.init(tree_map(lambda x: x.to(mesh.device), init(init_key)), key=step_key)
    if o.resume and (found := fs.latest(o.save)):
        state = fs.restore(found, state)

    def mine(whole_BT: torch.Tensor) -> fs.Batch:
        rows = torch.arange(len(whole_BT)).tensor_split(ranks.size)[ranks.rank]
        return fs.Batch(whole_BT[rows].to(mesh.device), rows.to(mesh.device))

    def evaluate() -> float:
        parts = held_out.split(64)
        return sum(float(step.evaluate(state, mine(part))["loss"]) * len(part) for part in parts) / len(held_out)

    start, every = int(state.step), max(5, o.steps // 10)
    losses, curve, seconds, speed = [], {}, 0.0, 0.0
    with progress(o.steps, start, show=ranks.rank == 0) as bar:
        for i in range(start, o.steps):
            began = time.perf_counter()
            state, metrics = step(state, mine(pieces(train, o.batch, fs.random.fold_in(data_key, i))))
            losses.append(float(metrics["loss"]))
            seconds += time.perf_counter() - began
            speed = o.batch * CONTEXT * len(losses) / seconds
            bar.update(0, advance=1, loss=losses[-1], speed=speed, lr=schedule(i))
            if (i + 1) % every == 0 or i + 1 == o.steps:
                curve[i + 1] = evaluate()
                if ranks.rank == 0:
                    bar.print(f"step {i + 1:4d}  loss {losses[-1]:.5f}  held-out {curve[i + 1]:.5f}")
                if o.save:
                    fs.save(f"{o.save}/step-{i + 1}", state)

    held_out_loss = curve[o.steps] if losses else evaluate()
    params = step.params(state)
    if ranks.rank == 0:
        torch.set_num_threads(1)                    # one text, byte by byte: too little work to share
        picture = draw(Path(o.out), start, losses, curve, bigram)
        print(f"\n{sample(params, PROMPT, 300, sample_key)}\n")
        print(f"held-out loss {held_out_loss:.4f} nats a byte, bigram model {bigram:.4f}; {speed:,.0f} tokens/s; see {picture}")
    if ranks.rank == 0 and o.json:
        print(json.dumps({"losses": losses, "heldout": held_out_loss, "bigram": bigram, "tokens_per_s": speed}))


# ---------------------------------------------------------------- what one sees of it
def progress(steps: int, start: int, show: bool) -> Progress:
    """A bar of one task, 0."""
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"), BarColumn(None), TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s  lr {task.fields[lr]:.1e}"), disable=not show,
    )
    bar.add_task("", total=steps, completed=start, loss=math.nan, speed=0.0, lr=0.0)
    return bar


def draw(folder: Path, start: int, losses: list[float], curve: dict[int, float], bigram: float) -> Path:
    """The loss curve as a picture."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    axes.plot(range(start + 1, start + 1 + len(losses)), losses, alpha=0.5, label="training batch")
    axes.plot(list(curve), list(curve.values()), "o-", label="held-out text")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram model on held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "train_gpt.png", dpi=120)
    return folder / "train_gpt.png"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("the run").add_argument
    add("--steps", type=int, default=500, metavar="N", help="updates; for a tenth of them the learning rate rises (500)")
    add("--batch", type=int, default=16, metavar="ROWS", help=f"texts of {CONTEXT} bytes in a step, over all processes (16)")
    add("--lr", type=float, default=3e-3, metavar="RATE", help="the highest learning rate (0.003)")
    add("--dropout", type=float, default=0.0, metavar="RATE", help="in each layer; for runs of many more steps (0)")
    add("--seed", type=int, default=0, help="of parameters, batches, dropout and the sample (0)")

    add = parser.add_argument_group("transforms: what they do, and what they cost").add_argument
    add(
        "--zero", type=int, choices=range(4), default=0,
        help="on several processes. 0: each keeps all parameters and moments; gradients are summed once a step. 1: each keeps its "
        "share and gathers all parameters once a step; as much is sent. 2: it keeps its share of the gradients too; they are sent "
        "once a microbatch. 3: each layer is gathered where it is used; the least memory, and three sends a microbatch (0)",
    )
    add("--checkpoint", action="store_true", help="keep only what goes into a layer, run it again in backward: one more forward")
    add("--accumulate", type=int, default=1, metavar="N", help="take the batch in N parts: activations of one, a gradient more (1)")
    add("--bf16", action="store_true", help="compute in bfloat16, keep float32: half the activations; slow where hardware lacks it")

    add = parser.add_argument_group("results").add_argument
    add("--out", default=".", metavar="DIR", help="where train_gpt.png goes (here)")
    add("--save", metavar="DIR", help="save ten times a run, each time to a new folder DIR/step-N: 12 bytes a parameter")
    add("--resume", action="store_true", help="go on from the last in --save DIR as if uninterrupted; other options as they were")
    add("--json", action="store_true", help="end with a line of JSON: losses, heldout, bigram, tokens_per_s")
    o = parser.parse_args()
    if o.resume and not o.save:
        parser.error("--resume needs --save DIR")
    return o


if __name__ == "__main__":
    main(options())
