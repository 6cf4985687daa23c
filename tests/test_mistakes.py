"""What a first hour with fspeed gets wrong: each mistake is an error that names it."""
import pytest
import torch

import fspeed as fs
from fspeed.testing.pool import RankError, ranks

PARAMS = {"blocks": [{"w": torch.eye(2)}, {"w": torch.eye(2)}], "out": torch.ones(2)}


def loss(params, batch, key):
    return fs.mean(batch @ params["out"])


def step(loss=loss, layers="blocks/*"):
    return fs.step(loss, fs.optim.sgd(0.1), layers=layers)


def test_init_of_something_else():
    with pytest.raises(TypeError, match=r"got a State; step\.params\(state\)"):
        step().init(step().init(PARAMS))
    with pytest.raises(TypeError, match="a key is an int32 tensor"):
        step().init(PARAMS, key=3)


def test_a_group_that_is_not_there():
    with pytest.raises(KeyError, match=r"no group 'out', there are root, blocks/0, blocks/1; step\.params\(state\)"):
        step().init(PARAMS).params["out"]


def test_optimizers():
    with pytest.raises(TypeError, match=r"chain: argument 0 .* got a list; give chain\(a, b\)"):
        fs.optim.chain([fs.optim.scale(1.0), fs.optim.scale(1.0)])
    other = fs.step(loss, fs.optim.adamw(0.1), layers="blocks/*")
    with pytest.raises(ValueError, match="another optimizer's"):
        step()(other.init(PARAMS), torch.ones(3, 2))


def test_arguments_in_another_order():
    with pytest.raises(ValueError, match=r"got a Step$"):
        fs.accumulate(2, step())


def test_optimizers_that_are_none():
    with pytest.raises(TypeError, match=r"as fs\.optim\.adamw\(1e-3\) or optax's are; got AdamW"):
        fs.step(loss, torch.optim.AdamW)
    with pytest.raises(TypeError, match=r"learning_rate must be a number, .* got '0\.1'"):
        fs.optim.adamw("0.1")
    masked = fs.step(loss, fs.optim.adamw(0.1, mask={"out": True}), layers="blocks/*")
    with pytest.raises(ValueError, match=r"a mask, or a tree of labels, does not fit the parameters: .*blocks"):
        masked(masked.init(PARAMS), torch.ones(3, 2))


@pytest.mark.parametrize(("made", "run"), [("blocks/*", ()), ((), "blocks/*"), ("blocks/*", "blocks")])
def test_a_state_of_other_layers(made, run):
    with pytest.raises(ValueError, match=r"this state was cut into root.*, not by this step's layers="):
        step(layers=run)(step(layers=made).init(PARAMS), torch.ones(3, 2))


def test_buffers_that_do_not_come_back():
    s = step(lambda params, batch, key, buffers: (loss(params, batch, key), {"seen": buffers["seen"] + 1}))
    with pytest.raises(TypeError, match=r"must return \(loss, \{name: fs.Loss\}, buffers\) .* got a pair"):
        s(s.init(PARAMS, buffers={"seen": torch.zeros(())}), torch.ones(3, 2))


def test_a_step_tells_what_it_is():
    s = fs.zero_shard(step(), fs.mesh(data=1))
    assert str(s) == "Step(loss=loss, layers='blocks/*', params flat shards over 'data' (1), over data=1)"


@pytest.mark.parametrize("kind", ["values", "leaves"])
def test_parameters_that_differ_over_ranks(kind):
    def init():
        rank, mesh = torch.distributed.get_rank(), fs.mesh(data=-1)
        params = {**PARAMS, "out": torch.ones(2) + rank} if kind == "values" else {**PARAMS, f"x{rank}": torch.ones(())}
        return fs.data_parallel(step(), mesh).init(params)

    messages = {"values": r"leaf 'out' has different values on the ranks of axis 'data'", "leaves": "params of different leaves"}
    with pytest.raises(RankError, match=messages[kind]):
        ranks(2)(init)
