"""Which path makes the numbers: the CPU's, the GPU's, or the plain operations that a trace can see."""
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from . import cpu, reference


def dispatch(key: Tensor, start: int | Tensor) -> tuple[ModuleType, Tensor, int | Tensor]:
    """The path for a key and starts, and the two as it takes them."""
    if traced():
        return reference, key, start
    bare_key, bare_start = bare(key), bare(start)
    if bare_key is None or bare_start is None:
        return reference, key, start
    if key.is_cpu:
        return cpu, bare_key, bare_start
    return triton_path() if key.is_cuda else reference, bare_key, bare_start


def bare(value: Any) -> Any:
    """value out of the wrappers of torch.func.grad (an integer has no derivative to lose), or None if its numbers are not there."""
    while isinstance(value, Tensor) and functorch.is_gradtrackingtensor(value):
        value = functorch.get_unwrapped(value)
    if isinstance(value, Tensor) and (type(value) is not Tensor or functorch.is_functorch_wrapped_tensor(value)):
        return None
    return value


def traced() -> bool:
    """Whether operations are being recorded, or done on fake tensors."""
    fake = torch._C._TorchDispatchModeKey.FAKE
    return torch.compiler.is_compiling() or get_proxy_mode() is not None or torch._C._get_dispatch_mode(fake) is not None


@cache
def triton_path() -> ModuleType:
    try:
        from . import kernel
    except ImportError:                                # no Triton on this platform
        return reference
    return kernel
