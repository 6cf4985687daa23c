"""What a first hour with fspeed gets wrong: each mistake is an error that names it."""
import pytest
import torch

import fspeed as fs

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
