"""A step is a function: differentiate through ten of them, and run eight trainings at once.

    python examples/meta_learning.py
"""
import torch

import fspeed as fs

x = fs.random.normal(fs.random.key(1), (64, 8))
y = torch.sin(x.sum(1, keepdim=True))


def loss(params, batch, key):
    x, y = batch
    return fs.mean((torch.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def train(log_rate, key):
    """The loss after ten steps from the parameters of a key, at the learning rate exp(log_rate)."""
    k1, k2 = fs.random.split(key)
    step = fs.step(loss, fs.optim.sgd(log_rate.exp()))
    state = step.init({"w1": fs.random.normal(k1, (8, 32)) / 3, "w2": fs.random.normal(k2, (32, 1)) / 6})
    for _ in range(10):
        state, _ = step(state, (x, y))
    return step.evaluate(state, (x, y))["loss"]


# learn the learning rate: gradient descent on the loss after ten steps, differentiated through all of them
log_rate, key = torch.tensor(0.001).log(), fs.random.key(0)
for _ in range(16):
    slope, final = torch.func.grad_and_value(train)(log_rate, key)
    print(f"learning rate {log_rate.exp():.4f}: loss {final:.4f} after ten steps, slope {slope:+.4f}")
    log_rate = log_rate - 4 * slope

# an ensemble: the same ten steps from eight keys at once
keys = fs.random.split(fs.random.key(0), 8)
losses = torch.vmap(train, in_dims=(None, 0))(log_rate, keys)
print("an ensemble of eight:", *(f"{final:.4f}" for final in losses))
assert torch.allclose(losses, torch.stack([train(log_rate, key) for key in keys]))
