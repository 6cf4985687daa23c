"""Activation checkpointing: layers are run again in backward instead of kept."""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fspeed.grad import closed_over, in_jvp, in_torch_func, requires_grad, vjp
from fspeed.opened import At
from fspeed.shard.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fspeed.step import Step, around

dead = torch._C._functorch.unwrap_if_dead       # what a Function saved may be wrapped for a torch.func level that is gone


def checkpoint(
    step: Step, *, where: Callable[[At], bool] = lambda at: True, save: Callable[[Any], bool] | None = None
) -> Step:
    """Same in and out as the step; layers keep only their arguments, and are run again in backward.

    Args:
        step: a step. Only its layers (`layers=` of `fs.step`) are run again: without any, everything is kept.
        where: which layers, from where they stand: `lambda at: at.index % 2 == 0` is every second one.
        save: which operations' outputs are kept and not computed again, a predicate on `torch._ops.OpOverload`:
            `lambda op: op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)`. None by default.

    Returns:
        A step with the same randomness: a key is an argument like any other, and torch's generators are set back for backward.

    Raises:
        TypeError: when called: a layer uses a differentiated tensor that is not among its arguments; its gradient would be lost.

    Cost: one more forward of these layers; of their activations, only arguments are held from forward to backward.

    Source: Chen et al., arXiv 1604.06174.

    >>> from fspeed import optim
    >>> from fspeed.layer import layer
    >>> from fspeed.loss import mean
    >>> from fspeed.step import step
    >>> tanh = layer(lambda p, x: torch.tanh(p["w"] * x))
    >>> s = checkpoint(step(lambda p, batch, key: mean(tanh(p["block"], batch)), optim.sgd(1.), layers="block"))
    >>> s.params(s(s.init({"block": {"w": torch.tensor(0.)}}), torch.tensor([1., 3.]))[0])
    {'block': {'w': tensor(-2.)}}
    """
    return around(step, lambda fn, at: remat(fn, save=save, name=at.names) if where(at) else fn)


def remat(fn: Callable, *, save: Callable[[Any], bool] | None = None, name: Any = None) -> Callable:
    """`fn`, computed again in backward: only its arguments are kept; what `checkpoint` does to a layer.

    Args:
        fn: a function of pytrees to a pytree.
        save: which operations' outputs are kept, as for `checkpoint`.
        name: what to call it in an error.

    Returns:
        A function with the same values and derivatives of all orders, under autograd and torch.func.

    Cost: one more `fn`.

    >>> torch.func.grad(torch.func.grad(remat(lambda x: (x * x) * x)))(torch.tensor(2.))
    tensor(12.)
    """
    def run(*args, **kwargs):
        if in_jvp():
            return fn(*args, **kwargs)      # forward mode keeps nothing that could be computed again
        refuse_closures(fn, name)
        leaves, spec = tree_flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        box: Any = {}

        def flat(*tensors):
            full = list(leaves)
            for i, x in zip(at, tensors, strict=True):
                full[i] = x
            args, kwargs = tree_unflatten(spec, full)
            outs, box["spec"] = tree_flatten(fn(*args, **kwargs))
            box["outs"] = [None if isinstance(o, Tensor) else o for o in outs]
            return tuple(o for o in outs if isinstance(o, Tensor))

        tensors = [leaves[i] for i in at]
        for i in at:
            leaves[i] = None
        outs = iter(_Remat.apply(Redrawn(flat), Saved(save) if save else None, name, *tensors))
        return tree_unflatten(box["spec"], [next(outs) if o is None else o for o in box["outs"]])

    return run


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(flat, saved, name, *tensors):
        outs = flat(*tensors) if saved is None else saved.recording(flat, tensors)
        return tuple(o.view_as(o) if any(o is x for x in tensors) else o for o in outs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.flat, ctx.saved, ctx.name, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*[o for o in output if not real(o)])

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = [dead(x) for x in ctx.saved_tensors]
        at = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        flat = ctx.flat if ctx.saved is None else ctx.saved.replaying(ctx.flat)

        def f(xs):
            outs = [o for o in flat(*_put(tensors, at, xs)) if real(o)]
            refuse_strangers(outs, [*xs, *tensors], ctx.name)
            return outs, None

        _, pull, _ = vjp(f, [tensors[i] for i in at], tensors)
        grads = pull([c for c in cotangents if c is not None and real(c)])
        return None, None, None, *_put([None] * len(tensors), at, grads)


def _put(into: list, at: list[int], values) -> list:
    full = list(into)
    for i, x in zip(at, values, strict=True):
        full[i] = x
    return full


def real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# ---------------------------------------------------------------- numbers that are drawn once
class Redrawn:
    """A function that draws, each time, what it drew from torch's own generators the first time."""

    def __init__(self, fn: Callable):
        self.fn = fn
        self.states: list[Tensor] | None = None         # what the first call found; [] if it drew nothing

    def __call__(self, *args: Any) -> Any:
        if self.states is None:
            self.states = generator_states()
            out = self.fn(*args)
            if all(map(torch.equal, self.states, generator_states())):
                self.states = []
            return out
        now = generator_states() if self.states else []
        set_generators(self.states)
        try:
            return self.fn(*args)
        finally:
            set_generators(now)


def generators() -> list[torch.Generator]:
    on_gpu = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    return [torch.default_generator, *([torch.cuda.default_generators[torch.cuda.current_device()]] if on_gpu else [])]


def generator_states() -> list[Tensor]:
    return [g.get_state() for g in generators()]


def set_generators(states: list[Tensor]) -> None:
    for g, state in zip(generators(), states, strict=False):
        g.set_state(state)


# ---------------------------------------------------------------- gradients that would be lost
def refuse_closures(fn: Callable, name: Any) -> None:
    """Raise if a function uses, beside its arguments, a tensor that is differentiated."""
    lost = [held for held, x in closed_over(fn) if torch.is_grad_enabled() and requires_grad(x)]
    if lost:
        raise TypeError(_message(name, f"the differentiated tensor {lost[0]!r}"))


def refuse_strangers(outs: list[Tensor], xs: list[Tensor], name: Any) -> None:
    """Raise if results depend, as autograd sees it, on leaves other than xs."""
    if in_torch_func():
        return
    known, seen, todo = {id(x) for x in xs}, set(), [o.grad_fn for o in outs if o.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in known:
            raise TypeError(_message(name, f"a differentiated tensor of shape {tuple(node.variable.shape)}"))
        todo += [n for n, _ in node.next_functions if n is not None]


def _message(name: Any, what: str) -> str:
    who = f"layer {name!r}" if name is not None else "a checkpointed function"
    return f"{who} uses {what} that is not among its arguments; under checkpoint its gradient would be lost: pass it as an argument"


# ---------------------------------------------------------------- outputs that are kept
class Saved:
    """The outputs of chosen operations, in the order in which a function makes them."""

    def __init__(self, chosen: Callable[[Any], bool]):
        self.chosen = chosen
        self.outputs: list[Any] = []

    def recording(self, flat: Callable, tensors: tuple) -> tuple:
        self.outputs.clear()

        def keep(op: Callable[[], Any]) -> Any:
            self.outputs.append(op())
            return self.outputs[-1]

        with Intercepted(self, keep):
            return flat(*tensors)

    def replaying(self, flat: Callable) -> Callable:
        def run(*tensors):
            outputs = iter(self.outputs)
            with Intercepted(self, lambda op: next(outputs)):
                return flat(*tensors)

        return run

    def spare(self, written: list[Any]) -> None:
        """Keep a copy of each output that is about to be written over."""
        over = {x.untyped_storage().data_ptr() for x in written if isinstance(x, Tensor)}
        copy = lambda x: x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in over else x
        self.outputs = [tree_map(copy, out) for out in self.outputs]


class Intercepted(TorchDispatchMode):
    """Chosen operations go through `instead`, which is given the operation to do."""
    replays = True

    def __init__(self, saved: Saved, instead: Callable[[Callable[[], Any]], Any]):
        super().__init__()
        self.saved, self.instead = saved, instead

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            formal = zip(func._schema.arguments, args, strict=False)
            named = [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
            self.saved.spare(tree_leaves([x for a, x in (*formal, *named) if a.alias_info is not None and a.alias_info.is_write]))
        do = lambda: func(*args, **kwargs)
        return self.instead(do) if self.saved.chosen(func) else do()
