"""The table: every optimizer and transformation that the laws are for. A newcomer joins by one row.

A row is a function of the library, fspeed.optim or optax, so that one row makes both.
"""
import torch

from fspeed import optim
from fspeed.shard.pytree import tree_map

SHAPES = {"b": (4,), "layers": [{"w": (3, 4)}, {"w": (3, 4)}], "s": (), "z": (0, 8), "k": (2, 3, 3)}
MATRICES = {"b": False, "layers": True, "s": False, "z": False, "k": True}
LABELS = {"b": "other", "layers": [{"w": "first"}, {"w": "other"}], "s": "first", "z": "first", "k": "other"}

TABLE = {
    "sgd": lambda o: o.sgd(0.1),
    "sgd momentum": lambda o: o.sgd(0.1, 0.9),
    "sgd nesterov scheduled": lambda o: o.sgd(o.linear_schedule(0.1, 0.0, 8), 0.9, nesterov=True),
    "adam": lambda o: o.adam(0.1),
    "adam nesterov": lambda o: o.adam(0.1, b1=0.8, b2=0.95, nesterov=True),
    "adam eps_root": lambda o: o.adam(0.1, eps=1e-4, eps_root=1e-3),
    "adamw": lambda o: o.adamw(0.1, weight_decay=0.1),
    "adamw masked": lambda o: o.adamw(o.cosine_decay_schedule(0.1, 8), weight_decay=0.1, mask=MATRICES),
    "adamw scheduled decay": lambda o: o.adamw(0.1, weight_decay=o.linear_schedule(0.0, 0.1, 5)),
    "lion": lambda o: o.lion(0.1, weight_decay=0.1),
    "lion masked": lambda o: o.lion(o.linear_schedule(0.1, 0.0, 8), weight_decay=0.1, mask=MATRICES),
    "lion smooth": lambda o: o.scale_by_lion(mode="smooth", smooth_beta=2.0),
    "lion refined": lambda o: o.scale_by_lion(mode="refined"),
    "lamb": lambda o: o.lamb(0.1, weight_decay=0.1),
    "lamb masked": lambda o: o.lamb(0.1, weight_decay=0.1, mask=MATRICES),
    "lars": lambda o: o.lars(0.1, weight_decay=0.1),
    "lars masked": lambda o: o.lars(0.1, 0.1, MATRICES, trust_ratio_mask=MATRICES, nesterov=True),
    "fromage": lambda o: o.fromage(0.1),
    "fromage scheduled": lambda o: o.fromage(o.linear_schedule(0.1, 0.0, 8)),
    "adagrad": lambda o: o.adagrad(0.1),
    "rmsprop": lambda o: o.rmsprop(0.1),
    "rmsprop momentum": lambda o: o.rmsprop(0.1, initial_scale=1.0, eps_in_sqrt=False, momentum=0.9, nesterov=True),
    "rmsprop centered": lambda o: o.rmsprop(0.1, centered=True, momentum=0.5),
    "rmsprop bias correction": lambda o: o.rmsprop(0.1, bias_correction=True),
    "adadelta": lambda o: o.adadelta(1.0, weight_decay=0.1),
    "adafactor": lambda o: o.adafactor(0.1, min_dim_size_to_factor=3),
    "adafactor momentum": lambda o: o.adafactor(0.1, 3, momentum=0.9, weight_decay_rate=0.01, weight_decay_mask=MATRICES),
    "adafactor unfactored": lambda o: o.adafactor(clipping_threshold=None, multiply_by_parameter_scale=False),
    "trace": lambda o: o.trace(0.9),
    "ema": lambda o: o.ema(0.9),
    "clip": lambda o: o.chain(o.clip(0.5), o.sgd(0.1)),
    "clip_by_global_norm": lambda o: o.chain(o.clip_by_global_norm(0.5), o.adamw(0.1)),
    "clip_by_block_rms": lambda o: o.chain(o.clip_by_block_rms(0.5), o.sgd(0.1)),
    "adaptive_grad_clip": lambda o: o.chain(o.adaptive_grad_clip(0.1), o.sgd(0.1)),
    "param blocks": lambda o: o.chain(o.scale_by_param_block_norm(), o.scale_by_param_block_rms(), o.clip(1.0), o.sgd(0.1)),
    "masked": lambda o: o.chain(o.masked(o.adam(0.1), MATRICES), o.scale(0.5)),
    "masked norm": lambda o: o.masked(o.chain(o.clip_by_global_norm(0.5), o.sgd(0.1)), MATRICES),
    "partition": lambda o: o.partition({"first": o.adam(0.1), "other": o.sgd(0.1, 0.9)}, LABELS),
    "apply_if_finite": lambda o: o.apply_if_finite(o.adam(0.1), 2),
    "inject_hyperparams": lambda o: o.inject_hyperparams(o.adamw)(o.linear_schedule(0.1, 0.0, 8), b1=0.8),
    "named_chain": lambda o: o.named_chain(("trace", o.trace(0.9)), ("adam", o.adam(0.1))),
    "amsgrad": lambda o: o.amsgrad(0.1, b2=0.9),
    "amsgrad uncorrected": lambda o: o.amsgrad(0.1, bias_correction_mu=False, bias_correction_nu=False),
    "adamax": lambda o: o.adamax(0.1),
    "adamaxw": lambda o: o.adamaxw(0.1, weight_decay=0.1, mask=MATRICES),
    "adabelief": lambda o: o.adabelief(0.1, eps=1e-8, nesterov=True),
    "yogi": lambda o: o.yogi(0.1),
    "radam": lambda o: o.radam(0.1, b2=0.9),
    "adan": lambda o: o.adan(0.1, weight_decay=0.1),
    "ademamix": lambda o: contrib(o).ademamix(0.1, b3=o.linear_schedule(0.9, 0.99, 5), weight_decay=0.1),
    "novograd": lambda o: o.novograd(0.1, weight_decay=0.1),
    "sign_sgd": lambda o: o.sign_sgd(0.1),
    "signum": lambda o: o.signum(0.1),
    "schedule_free_sgd": lambda o: contrib(o).schedule_free_sgd(0.1, 5, weight_decay=0.1),
    "schedule_free_adamw": lambda o: contrib(o).schedule_free_adamw(0.1, 5, weight_decay=0.1),
    "muon": lambda o: contrib(o).muon(0.1, weight_decay=0.1, muon_weight_dimension_numbers=matrices(o)),
    "muon wide": lambda o: contrib(o).muon(
        0.1, "dion", nesterov=False, adaptive=True, preconditioning="spectral", consistent_rms=0.2, adam_learning_rate=0.01,
        muon_weight_dimension_numbers={**matrices(o), "k": contrib(o).MuonDimensionNumbers((0, 2), 1)},
    ),
    "muon aol": lambda o: contrib(o).muon(0.1, preconditioning="aol", muon_weight_dimension_numbers=matrices(o)),
    "muon schatten": lambda o: contrib(o).muon(0.1, preconditioning="schatten", muon_weight_dimension_numbers=matrices(o)),
}


def contrib(library):
    return library if library is optim else library.contrib


def matrices(library):
    """Dimension numbers for the layers only: optax's Muon fails on an empty matrix."""
    return {**dict.fromkeys("bkzs"), "layers": contrib(library).MuonDimensionNumbers()}


def is_shape(x):
    return isinstance(x, tuple)


def drawn(seed, dtype=torch.float32, scale=1.0):
    """A tree of normal numbers of all shapes, in a dtype, times a scale."""
    source = torch.Generator().manual_seed(seed)
    return tree_map(
        lambda shape: (scale * torch.randn(shape, generator=source, dtype=torch.float64)).to(dtype), SHAPES, is_leaf=is_shape
    )


def trained(optimizer, params, grads, state=None):
    """Parameters and state after an update for each of grads, by `update`."""
    state = optimizer.init(params) if state is None else state
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optim.apply_updates(params, updates)
    return params, state
