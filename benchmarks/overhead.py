"""What a step costs in eager mode, against `loss.backward()` and `torch.optim.AdamW(fused=True)` written by hand.

Both write over their parameters and moments: fspeed's by `fs.donate`. `pure` is the step that leaves its input as it was.
"""
import statistics

import torch

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import agree, interleaved, ratio
from fspeed.testing.count import allocated_peak

CLAIMS = {
    "time": "eager step of a 17M GPT, against the loop written by hand: CPU time",
    "peak": "... allocated peak",
    "tiny_time": "eager step of a tiny GPT, against the loop written by hand: CPU time",
}


def by_hand(size: gpt.Size, compiled=lambda model: model):
    model = gpt.module(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **gpt.ADAMW)
    model = compiled(model)

    def step(i: int) -> torch.Tensor:
        loss = model(*gpt.batch(size, i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def functional(step: fs.Step, size: gpt.Size):
    box = [step.init(gpt.params(size))]

    def run(i: int) -> torch.Tensor:
        new, metrics = step(box.pop(), gpt.batch(size, i))
        box.append(new)
        return metrics["loss"]

    return run


def peers(size: gpt.Size) -> dict:
    step = gpt.step(size)
    return {"by hand": by_hand(size), "fspeed": functional(fs.donate(step), size), "fspeed, pure": functional(step, size)}


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    torch.set_num_threads(1)
    rows, ratios = [], {}
    for prefix, size, rounds in (("", gpt.Size(), 10 if quick else 40), ("tiny_", gpt.TINY, 60 if quick else 300)):
        steps = peers(size)
        cpu, _, losses = interleaved(steps, rounds)
        agree(losses, 1e-4)
        peaks = {name: allocated_peak(lambda step=step: step(0)) for name, step in steps.items()}
        for name in steps:
            rows.append({
                "what": f"{'tiny' if prefix else '17M'} GPT, {name}", "CPU ms": statistics.median(cpu[name]) * 1e3,
                "over by hand": ratio(cpu, name, "by hand"), "peak MB": peaks[name] / 1e6, "over": peaks[name] / peaks["by hand"],
            })
        ratios[f"{prefix}time"] = ratio(cpu, "fspeed", "by hand")
        ratios[f"{prefix}peak"] = peaks["fspeed"] / peaks["by hand"]
        ratios[f"{prefix}pure_time"] = ratio(cpu, "fspeed, pure", "by hand")
        ratios[f"{prefix}pure_peak"] = peaks["fspeed, pure"] / peaks["by hand"]
    return rows, ratios
