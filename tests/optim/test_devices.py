"""On a device nothing is left on the host and nothing is waited for: on fake tensors, and on a GPU where there is one."""
import pytest
import torch
from optimizer_table import SHAPES, TABLE, drawn, is_shape, trained
from torch._subclasses.fake_tensor import FakeTensorMode

from fspeed import optim
from fspeed.shard.pytree import tree_leaves, tree_map
from fspeed.testing import assert_close

every_row = pytest.mark.parametrize("name", TABLE)


def fake(layers="cuda"):
    """Leaves on the GPU, those of the layers where they are said to be."""
    on = lambda device, shapes: tree_map(lambda shape: torch.zeros(shape, device=device), shapes, is_leaf=is_shape)
    return {**on("cuda", SHAPES), "layers": on(layers, SHAPES["layers"])}


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
        params, state = trained(opt, fake(), [fake()])
        assert {x.device.type for x in tree_leaves((params, state))} == {"cuda"}
        if opt.apply:
            params, state = opt.apply(fake(), state, params)
            assert {x.device.type for x in tree_leaves((params, state))} == {"cuda"}


@every_row
def test_leaves_on_two_devices_stay_where_they_are(name, monkeypatch):
    """As when some groups are offloaded: scalars move, leaves do not."""
    for kernel in ("_fused_adamw_", "_fused_sgd_"):
        monkeypatch.setattr(torch, kernel, lambda *lists, **numbers: None)
    with FakeTensorMode():
        opt, params = TABLE[name](optim), fake("cpu")
        state = opt.init(params)
        if opt.apply:
            params, state = opt.apply(fake("cpu"), state, params)
        params, state = trained(opt, params, [fake("cpu")], state)
        assert [x.device.type for x in tree_leaves(params)] == [x.device.type for x in tree_leaves(fake("cpu"))]


@pytest.mark.gpu
def test_case_52_a_gpu_gives_what_the_cpu_gives():
    for name in TABLE:
        compare(name)


def compare(name):
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
