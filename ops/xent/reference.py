"""Cross entropy in plain operations of PyTorch: a row's three numbers, and the loss that they make."""
import torch
from torch import Tensor
from torch.nn.functional import linear


def statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row (..., V): its log-sum-exp, its target's logit (0 if that is not in [0, V)), its mean; in float32 at least."""
    logits = logits.to(accumulator(logits.dtype))
    inside = (targets >= 0) & (targets < logits.shape[-1])
    picked = logits.gather(-1, torch.where(inside, targets, 0)[..., None])[..., 0]
    return logits.logsumexp(-1), torch.where(inside, picked, 0), logits.mean(-1)


def linear_statistics(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """statistics(x W^T + b)."""
    return statistics(linear(x, weight, bias), targets)


def linear_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, by: Tensor, label_smoothing: float, z_loss: float, chunk: int,
    gradients: bool,
) -> tuple[Tensor, ...]:
    """sum(by * losses); and, for its backward, the losses and its gradients in x, weight and bias, empty where not wanted."""
    def losses(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return loss(*linear_statistics(x, weight, bias, targets, chunk), label_smoothing, z_loss)

    def total(*floats: Tensor) -> Tensor:
        return (losses(floats[0], floats[1], floats[2] if bias is not None else None) * by).sum()

    inputs = [x, weight] if bias is None else [x, weight, bias]
    each = losses(x, weight, bias)
    out = (each * by).sum()
    found = torch.func.vjp(total, *inputs)[1](torch.ones_like(out)) if gradients else ()
    return out, each.detach(), *(t.detach() for t in found), *(x.new_empty(0) for _ in range(3 - len(found)))


def linear_sum_shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, by: Tensor, label_smoothing: float, z_loss: float, chunk: int,
    gradients: bool,
) -> tuple[Tensor, ...]:
    """What `linear_sum` returns, with no numbers."""
    found = [torch.empty_like(t) for t in (x, weight, bias) if t is not None] if gradients else []
    dtype = accumulator(x.dtype)
    return (
        x.new_empty((), dtype=dtype), x.new_empty(targets.shape, dtype=dtype), *found,
        *(x.new_empty(0) for _ in range(3 - len(found))))


def loss(lse: Tensor, picked: Tensor, mean: Tensor, label_smoothing: float, z_loss: float) -> Tensor:
    """lse - (1 - s) picked - s mean + z lse^2. The mean is not looked at where s = 0: it may be -inf."""
    out = lse - (1 - label_smoothing) * picked
    if label_smoothing:
        out = out - label_smoothing * mean
    return out + z_loss * lse.square() if z_loss else out


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64."""
    return torch.promote_types(dtype, torch.float32)
