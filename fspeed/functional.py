"""An `nn.Module` as a pure function of its parameters and buffers."""
import copy
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fspeed import random
from fspeed.layer import layer, lookup
from fspeed.tree import chooser


def functional(module: nn.Module, layers: str | Iterable[str] | Callable[[str], bool] = ()) -> tuple[Callable, Any, Any]:
    """A module as `(apply, params, buffers)`, with the submodules that `layers` names as layers: an existing model, unchanged.

        out, buffers = apply(params, buffers, *args, key=key)

    Args:
        module: any module; it is left as it is, and may be dropped.
        layers: globs over key paths, or a predicate: `"transformer/h/*"`. Give `fs.step(layers=...)` the same.

    Returns:
        apply: `(params, buffers, *args, key=None, **kwargs) -> (out, buffers)`. With a key the module is in training mode and
            its dropout is a function of the key; with None it is in evaluation mode. Buffers that forward writes, such as
            BatchNorm's, come back new; the others are the same tensors.
        params: a nested tree, `params["transformer"]["h"][0]["attn"]["weight"]`; a tied tensor is there under each name.
        buffers: likewise.

    Raises:
        ValueError: `layers` matches no submodule.
        RuntimeError: when called: forward draws random numbers in another way than by dropout.

    >>> from fspeed import random
    >>> from torch import nn
    >>> apply, params, buffers = functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    >>> out, new = apply(params, buffers, torch.ones(4, 2), key=random.key(0))
    >>> out.shape, buffers["1"]["num_batches_tracked"], new["1"]["num_batches_tracked"]
    (torch.Size([4, 3]), tensor(0), tensor(1))
    """
    tensors = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    params = {n: tensors[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
    buffers = {n: tensors[id(b)] for n, b in module.named_buffers(remove_duplicate=False)}
    root = hollow(module)
    names = _chosen(root, chooser(layers)) if layers else []
    first = Hollow(root, [_cut_out(root, name, i) for i, name in enumerate(names)])
    hollows: dict[int, Hollow] = {}         # one for each thread: a module is written to while it runs
    known: dict[int, str] = {}
    first_name = {n: known.setdefault(id(b), n) for n, b in module.named_buffers(remove_duplicate=False)}
    inside = lambda prefix, flat: [n for n in flat if n.startswith(prefix)]
    in_layers = {n for name in names for n in inside(name + ".", (*params, *buffers))}

    def values(tree: Any, flat: Iterable[str], prefix: str = "") -> dict[str, Any]:
        return {n.removeprefix(prefix): lookup(tree, n.replace(".", "/")) for n in flat}

    def mine() -> Hollow:
        me = threading.get_ident()
        return hollows.get(me) or hollows.setdefault(me, copy.deepcopy(first))

    def apply(params_: Any, buffers_: Any, *args: Any, key: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        written: dict[str, Tensor] = {}

        def run(i: int, args: tuple, kwargs: dict) -> Any:
            prefix = names[i] + "."
            keys = [n.removeprefix(prefix) for n in inside(prefix, params)]
            same = {n.removeprefix(prefix): first_name[n] for n in inside(prefix, buffers)}

            def fn(p: Any, b: dict, key: Any, args: tuple, kwargs: dict) -> tuple[Any, dict]:
                return called(mine().parts[i], values(p, keys), b, same, key, args, kwargs)

            own = None if key is None else random.fold_in(key, i + 1)
            handle = lookup(params_, names[i].replace(".", "/"))
            out, new = layer(fn)(handle, values(buffers_, inside(prefix, buffers), prefix), own, args, kwargs)
            written.update({prefix + n: b for n, b in new.items()})
            return out

        here = mine()
        here.prepare(run, key is not None)
        outer = values(params_, (n for n in params if n not in in_layers))
        rest = values(buffers_, (n for n in buffers if n not in in_layers))
        out, new = called(here.root, outer, rest, first_name, key, args, kwargs)
        written.update(new)
        return out, nested({n: written.get(n, old) for n, old in values(buffers_, buffers).items()})

    return apply, nested(params), nested(buffers)


def called(
    module: nn.Module, params: dict, buffers: dict, first_name: dict[str, str], key: Any, args: tuple, kwargs: dict,
) -> tuple[Any, dict[str, Tensor]]:
    """A hollow module's output, and the buffers that it wrote. `first_name`: one name for those that are one tensor."""
    module.train(key is not None)
    clones: dict[str, Tensor] = {}
    own = {n: clones.setdefault(first_name[n], b.clone()) for n, b in buffers.items()}
    given = {**params, **own}
    with Drawn(key) as drawn:
        out = torch.func.functional_call(module, given, args, kwargs)       # what forward assigns anew is in `given` afterwards
    normed = {id(x) for x in drawn.written if key is not None}
    return out, {n: given[n] for n, b in own.items() if given[n] is not b or b._version > 0 or id(b) in normed}


@dataclass
class Hollow:
    """A module without tensors, with holes where its layers were, and the layers."""
    root: nn.Module
    parts: list[nn.Module]

    def prepare(self, run: Callable, training: bool) -> None:
        """Call the layers by run(index, args, kwargs)."""
        for part in self.parts:
            part.train(training)            # what is round a layer may ask
        for hole in self.root.modules():
            if isinstance(hole, Hole):
                hole.run = run


def hollow(module: nn.Module) -> nn.Module:
    """A copy of a module without its parameters' and buffers' memory."""
    memo: dict[int, Any] = {}
    for t in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(t, device="meta")
        memo[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


class Hole(nn.Module):
    """Stands where a submodule was that is called as a layer."""

    def __init__(self, index: int, part: nn.Module):
        super().__init__()
        self.index, self.part = index, (part,)          # in a tuple, so that its tensors are not this module's
        self.run: Callable[[int, tuple, dict], Any]

    def __getattr__(self, name: str) -> Any:
        """What the module round it asks about the submodule, such as its sizes."""
        return getattr(self.__dict__["part"][0], name)

    def forward(self, *args, **kwargs):
        return self.run(self.index, args, kwargs)


def _chosen(module: nn.Module, is_layer: Callable[[str], bool]) -> list[str]:
    with_params = [n for n, m in module.named_modules() if n and next(m.parameters(), None) is not None]
    paths = [n for n in with_params if is_layer(n.replace(".", "/"))]
    found = [n for n in paths if not any(n.startswith(other + ".") for other in paths)]
    if not found:
        some = ", ".join(n.replace(".", "/") for n in with_params[:7])
        raise ValueError(f"functional: layers= matches no submodule with parameters; there are {some} ...")
    return found


def _cut_out(module: nn.Module, name: str, index: int) -> nn.Module:
    part = module.get_submodule(name)
    module.set_submodule(name, Hole(index, part))
    return part


def nested(flat: dict[str, Any]) -> Any:
    """{"a.0.w": x} as {"a": [{"w": x}]}: lists where the keys are 0, 1, 2, ...

    >>> nested({"h.0.w": 1, "h.1.w": 2, "b": 3})
    {'h': [{'w': 1}, {'w': 2}], 'b': 3}
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return _listed(tree)


def _listed(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    tree = {k: _listed(v) for k, v in tree.items()}
    return list(tree.values()) if tree and list(tree) == [str(i) for i in range(len(tree))] else tree


# ---------------------------------------------------------------- randomness
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "poisson", "binomial", "gumbel_softmax", "bernoulli_", "uniform_", "normal_", "exponential_", "cauchy_", "geometric_",
    "log_normal_", "random_",
}
DROPOUTS = {        # beside F.dropout and torch.dropout
    "dropout1d", "dropout2d", "dropout3d", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout", "rrelu", "rrelu_",
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def draws(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a function of torch, called so, draws from torch's generator; F.dropout and torch.dropout aside."""
    if name in DROPOUTS:
        flags, numbers = ([x for x in args if type(x) in kinds] for kinds in ((bool,), (int, float)))
        training = kwargs.get("training", kwargs.get("train", flags[0] if flags else not name.startswith("rrelu")))
        return bool(training) and kwargs.get("p", numbers[0] if numbers else 0.5) != 0
    if name in RECURRENT:
        return any(type(p) is float and p > 0 and training for p, training in pairwise(args))
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("training", True)) and kwargs.get("dropout_p", args[10] if len(args) > 10 else 0) != 0
    if name.startswith("fractional_max_pool"):
        return kwargs.get("_random_samples") is None
    return name in RANDOM


class Drawn(TorchFunctionMode):
    """Dropout by key in place of dropout by torch's generator, and no other randomness; notes what norms write."""

    def __init__(self, key: Any):
        super().__init__()
        self.key, self.draws = key, 0
        self.written: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self.dropout(*args, **kwargs)
        if func in (F.batch_norm, F.instance_norm):
            return self.normalized(func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in (F.batch_norm, F.instance_norm):
            return self.normalized(func, *args, **kwargs)
        if draws(name, args, kwargs):
            raise self.error(name)
        return func(*args, **kwargs)

    def normalized(self, norm, input, running_mean=None, running_var=None, weight=None, bias=None, *args, **kwargs):
        """F.batch_norm or F.instance_norm, with scale and shift in the dtype of the statistics; it writes without saying so."""
        like = lambda x: x if x is None or running_mean is None else x.to(running_mean.dtype)
        self.written += [running_mean, running_var]
        return norm(input, running_mean, running_var, like(weight), like(bias), *args, **kwargs)

    def dropout(self, input, p=0.5, training=True, inplace=False, train=None):
        if self.key is None or not (training if train is None else train) or p == 0:
            return input
        self.draws += 1
        return random.dropout(random.fold_in(self.key, self.draws), input, p)

    def error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"a functional module draws random numbers by {what}. Torch's own generator gives others under recompute, "
            "on other numbers of ranks and under jit: take a key as an argument and use fs.random, or set its dropout to 0"
        )
