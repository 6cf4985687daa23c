"""Optimizers in steps: under transforms, in any order, they give the bare step's parameters and state."""
import pytest

from fspeed import optim
from fspeed.shard.pytree import tree_map
from fspeed.testing import check_stack

MATRICES = lambda params: tree_map(lambda p: p.dim() > 1, params)
LABELS = lambda params: tree_map(lambda p: "matrix" if p.dim() > 1 else "other", params)
OPTIMIZERS = {
    "clipped adamw": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-3, eps=1e-3, weight_decay=0.1, mask=MATRICES)),
    "momentum": optim.sgd(optim.linear_schedule(0.5, 0.0, 5), 0.9),
    "lamb": optim.lamb(1e-2, eps=1e-3, weight_decay=0.1, mask=MATRICES),
    "lars": optim.lars(0.5, trust_ratio_mask=MATRICES),
    "adafactor": optim.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-6),
    "muon": optim.muon(1e-2, eps=1e-3),
    "partition": optim.partition({"matrix": optim.sgd(0.1, 0.9), "other": optim.adam(1e-3, eps=1e-3)}, LABELS),
    "injected": optim.inject_hyperparams(optim.sgd)(optim.linear_schedule(0.5, 0.0, 5), momentum=0.9),
}
STACKS = [("data_parallel", "checkpoint"), ("zero1", "accumulate"), ("checkpoint", "zero3")]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_gives_the_bare_steps_parameters_and_state(name, stack):
    # sums in another order; where a gradient is near zero, roots and orthogonal matrices enlarge it
    check_stack(stack, (5, 2), optimizer=OPTIMIZERS[name], tolerance=1e-3)
