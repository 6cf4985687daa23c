"""Compiled steps against `torch.compile(model)` with fused AdamW, and against the eager loop written by hand; one thread.

fspeed's step is `fs.jit(step, donate=True)`.
"""
import statistics

import torch

import fspeed as fs
from benchmarks import gpt
from benchmarks.measure import agree, interleaved, ratio
from benchmarks.overhead import by_hand, functional
from fspeed.testing.count import allocated_peak

CLAIMS = {
    "tiny_vs_eager": "compiled step of a tiny GPT, against the eager loop by hand: CPU time",
    "tiny_vs_compile": "... against torch.compile(model) and fused AdamW",
    "gpt_time": "compiled step of a 17M GPT, against torch.compile(model) and fused AdamW: CPU time",
    "gpt_peak": "... allocated peak",
}


def run(quick: bool) -> tuple[list[dict], dict[str, float]]:
    torch.set_num_threads(1)
    rows, ratios = [], {}
    for name, size, rounds in (("tiny", gpt.TINY, 60 if quick else 300), ("gpt", gpt.Size(), 8 if quick else 30)):
        steps = {
            "by hand": by_hand(size), "torch.compile": by_hand(size, torch.compile),
            "fspeed jit": functional(fs.jit(gpt.step(size), donate=True), size),
        }
        cpu, _, losses = interleaved(steps, rounds)
        agree(losses, 1e-4)
        peaks = {name: allocated_peak(lambda step=step: step(0)) for name, step in steps.items()}
        for peer in steps:
            rows.append({
                "what": f"{name}, {peer}", "CPU ms": statistics.median(cpu[peer]) * 1e3,
                "over by hand": ratio(cpu, peer, "by hand"), "over torch.compile": ratio(cpu, peer, "torch.compile"),
                "peak MB": peaks[peer] / 1e6,
            })
        ratios |= {
            f"{name}_vs_eager": ratio(cpu, "fspeed jit", "by hand"),
            f"{name}_vs_compile": ratio(cpu, "fspeed jit", "torch.compile"),
            f"{name}_peak": peaks["fspeed jit"] / peaks["torch.compile"],
        }
    ratios["gpt_time"] = ratios.pop("gpt_vs_compile")
    return rows, ratios
