import torch

import fspeed as fs


@fs.layer                                                               # the unit that transforms act on
def block(params, x):
    return x + torch.tanh(x @ params["w"])

def loss(params, batch, key):                                           # a plain function of a plain tree
    x, y = batch
    for p in params["blocks"]:
        x = block(p, x)
    return fs.mean((x @ params["out"] - y) ** 2)

fs.init_distributed()                                                   # all that torchrun started, or this process alone
step = fs.step(loss, fs.optim.adamw(0.02), layers="blocks/*")           # (state, batch) -> (state, metrics)
step = fs.zero_shard(step, fs.mesh(data=-1), stage=3)                   # divide parameters and moments over all ranks
step = fs.mixed_precision(step, torch.bfloat16)                         # gather and compute in bfloat16, keep float32
state = step.init({"blocks": [{"w": torch.eye(32) / 8} for _ in range(4)], "out": torch.zeros(32, 1)})
for i in range(50):
    x = torch.randn(256, 32)
    state, metrics = step(state, (x, x.sum(1, keepdim=True).tanh()))
    print(f"step {i:2d}  loss {metrics['loss']:.4f}")
