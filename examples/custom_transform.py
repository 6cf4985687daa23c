"""A transform of one's own: a moving average of the parameters, kept in the state, and its proof in three lines.

    python examples/custom_transform.py
"""
from dataclasses import replace

import torch

import fspeed as fs
from fspeed.shard.piece import only_live
from fspeed.shard.pytree import tree_map


def ema(step, decay=0.95):
    """Same in and out as the step; `state.extra["ema"]` is a moving average of its parameters, sharded as they are.

        average = decay * average + (1 - decay) * params

    Cost: one more copy of the parameters that are trained.
    """
    def update(apply):
        inner = step.update(apply)

        def run(grads, state):
            new, metrics = inner(grads, state)
            average = tree_map(lambda a, p: decay * a + (1 - decay) * p, state.extra["ema"], only_live(new.params))
            return new._replace(extra={**new.extra, "ema": average}), metrics

        return run

    start = lambda params: tree_map(torch.clone, only_live(params))
    return replace(step, update=update, extra=(*step.extra, ("ema", start)))


# the proof: in thirty stacks of other transforms, in any order, on two ranks and uneven batches, it gives the same answer
if __name__ == "__main__":
    from fspeed.testing import check_transform

    check_transform(ema, ranks=2, examples=30)

    # the use: noise keeps shaking the parameters, and their average lies closer to what made the data, (1, 1, 1, 1)
    def loss(params, batch, key):
        noise = fs.random.normal_rows(key)
        return fs.mean((batch @ params["w"] - batch.sum(1) - noise) ** 2)

    step = fs.step(loss, fs.optim.sgd(0.2))
    step = fs.accumulate(ema(fs.zero_shard(step, fs.mesh(data=-1))), 2)
    state = step.init({"w": torch.zeros(4)})
    for i in range(200):
        state, metrics = step(state, fs.random.normal(fs.random.key(i), (16, 4)))
    for name, params in {"parameters": step.params(state), "their average": fs.whole(state.extra["ema"])}.items():
        print(f"{name:14s} {params['w']}  off by {(params['w'] - 1).norm():.3f}")
