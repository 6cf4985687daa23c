"""Gradient accumulation: a batch in microbatches."""
import torch

from fspeed.grad import watched
from fspeed.shard.piece import at_least_float32
from fspeed.shard.pytree import tree_map
from fspeed.step import Batch, Grads, State, Step, inside
from fspeed.transforms._microbatches import split


def accumulate(step: Step, microbatches: int) -> Step:
    """Same in and out as the step; the batch is taken in microbatches, and their gradients are summed in at least float32.

        g = sum over microbatches of d total / d params, over the sum of their weights

    It is innermost wherever it stands in a stack: what others do once a step, they do once for all microbatches.

    Args:
        step: a step.
        microbatches: how many, at least 1. Rows are divided as evenly as may be; with fewer rows some are empty.

    Returns:
        A step that holds the activations of one microbatch at a time.

    Raises:
        ValueError: `microbatches` is no positive integer.

    Cost: one float32 accumulator a gradient; what stages 2 and 3 of ZeRO send, once a microbatch.

    >>> from fspeed import optim
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> s = accumulate(step(lambda p, batch, key: mean(p["w"] * batch), optim.sgd(1.)), 2)
    >>> s.params(s(s.init({"w": torch.tensor(0.)}), torch.tensor([1., 2., 3.]))[0])
    {'w': tensor(-2.)}
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(
            f"accumulate: microbatches must be a positive integer, got "
            f"{microbatches if isinstance(microbatches, (int, float)) else f'a {type(microbatches).__name__}'}"
        )

    def wrap(inner: Grads) -> Grads:
        def run(loss, state: State, batch: Batch):
            first, *rest = split(batch, microbatches)
            metrics, grads = inner(loss, state, first)
            if not rest:
                return metrics, grads
            add = torch.add if watched(grads) else torch.Tensor.add_
            total = tree_map(lambda g: g.to(at_least_float32(g.dtype), copy=True), grads)
            for part in rest:
                grads = None                # one set of gradients at a time beside the sums
                more, grads = inner(loss, state, part)
                metrics, total = tree_map(torch.add, metrics, more), tree_map(add, total, grads)
            return metrics, total

        return run

    return inside(step, wrap)
