"""On another device nothing is left on the host and nothing waits for the device: on fake tensors, and on a GPU where there is one."""
import pytest
import torch
from optimizer_table import SHAPES, TABLE, drawn, is_shape, trained
from torch._subclasses.fake_tensor import FakeTensorMode

from fspeed import optim
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import assert_close

every_row = pytest.mark.parametrize("name", TABLE)


def fake(device):
    return tree_map(lambda shape: torch.zeros(shape, device=device), SHAPES, is_leaf=is_shape)


def fused_adamw(params, grads, mus, nus, maxima, steps, *, lr, **numbers):
    """In place of torch's, which has no fake one for a tensor lr."""
    assert {x.device.type for x in (*params, *grads, *mus, *nus, *steps)} == {"cuda"}
    assert isinstance(lr, float) or (lr.device.type == "cuda" and lr.dtype == torch.float32)


@every_row
def test_an_update_stays_on_its_device_and_waits_for_nothing(name, monkeypatch):
    """A fake tensor has no value, so whatever asks for one raises."""
    monkeypatch.setattr(torch, "_fused_adamw_", fused_adamw)
    with FakeTensorMode():
        opt = TABLE[name](optim)
        params, state = trained(opt, fake("cuda"), [fake("cuda")] * 2)
        assert {x.device.type for x in tree_leaves((params, state))} == {"cuda"}
        if opt.apply:
            params, state = opt.apply(fake("cuda"), state, params)
            assert {x.device.type for x in tree_leaves((params, state))} == {"cuda"}


@pytest.mark.gpu
@every_row
def test_case_52_a_gpu_gives_what_the_cpu_gives(name):
    opt = TABLE[name](optim)
    on = lambda tree, device: tree_map(lambda x: x.to(device), tree)
    params, grads = drawn(0), [drawn(1 + i) for i in range(5)]
    expected, expected_state = trained(opt, params, grads)
    got, state = trained(opt, on(params, "cuda"), [on(g, "cuda") for g in grads])
    assert_close(on((got, state), "cpu"), (expected, expected_state), 1e-5, name)
    if opt.apply:
        mine, state, moved = on(params, "cuda"), opt.init(on(params, "cuda")), [on(g, "cuda") for g in grads]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for g in moved:
                mine, state = opt.apply(g, state, mine)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_close(on((mine, state), "cpu"), (expected, expected_state), 1e-5, name)
