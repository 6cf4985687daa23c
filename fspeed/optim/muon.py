"""Muon: updates of matrices with their singular values made equal."""
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspeed.optim.adam import adamw
from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, increment, new_count, stateless
from fspeed.optim.combine import chain
from fspeed.optim.decay import add_decayed_weights
from fspeed.optim.leaves import as_function, by_leaf, spread
from fspeed.optim.masking import Mask, partition
from fspeed.optim.moments import cast_like, debiased_mean, update_moment, zeros
from fspeed.optim.scale import scale_by_learning_rate, times
from fspeed.optim.wholes import on_whole
from fspeed.shard.pytree import tree_map

STANDARD = (3.4445, -4.7750, 2.0315)
PRESETS: dict[str, Any] = {
    "standard": STANDARD,
    "dion": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")


class MuonState(NamedTuple):
    """The number of updates (int32), the moving averages of gradients, and the coefficients of the iteration."""
    count: Tensor       # type: ignore[assignment]
    mu: Any
    ns_coeffs: Tensor


class MuonDimensionNumbers(NamedTuple):
    """Which dims of a leaf are a matrix's rows and its columns; all others count matrices."""
    reduction_axis: Sequence[int] | int = 0
    output_axis: Sequence[int] | int = 1


def newton_schulz(
    x: Tensor, ns_coeffs: Tensor, ns_steps: int = 5, preconditioning: str = "frobenius", eps: Number = 1e-8,
) -> Tensor:
    """Matrices with their singular values brought near 1.

        x = x / norm(x), then ns_steps times: x = a x + (b A + c A A) x,    A = x x^T

    Args:
        x: (matrices, rows, columns).
        ns_coeffs: (a, b, c), or one such row a step.
        ns_steps: how many steps; with rows, as many as there are.
        preconditioning: how x is scaled first: by its "frobenius" or "spectral" norm, or in step 1 by "aol" or "schatten".
        eps: the least norm.

    Cost: for n by m, n < m, about 4 n^2 m + 2 n^3 multiplications a step.

    Source: Jordan et al., kellerjordan.github.io/posts/muon.

    >>> newton_schulz(torch.tensor([[[3., 0.], [0., 4.]]]), torch.tensor(STANDARD))[0].round(decimals=1)
    tensor([[0.7000, 0.0000],
            [0.0000, 1.1000]])
    """
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, ns_coeffs, ns_steps, preconditioning, eps).mT
    if preconditioning in ("frobenius", "spectral"):
        order: Any = "fro" if preconditioning == "frobenius" else 2
        x = x / (torch.linalg.matrix_norm(x, order, keepdim=True) + eps)
    rows = ns_coeffs.to(x.device, x.dtype)
    for i, (a, b, c) in enumerate(rows if rows.dim() == 2 else [rows] * ns_steps):
        gram = x @ x.mH
        if i == 0 and preconditioning in ("aol", "schatten"):
            size = gram.abs().sum(-1, keepdim=True) if preconditioning == "aol" else torch.linalg.matrix_norm(gram, keepdim=True)
            by = size.clamp(min=eps).rsqrt()
            x, gram = x * by, gram * by * by.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scale_by_muon(
    ns_coeffs: Any = STANDARD, ns_steps: int = 5, beta: Number = 0.95, eps: Number = 1e-8, mu_dtype: torch.dtype | None = None,
    *, nesterov: bool = True, adaptive: bool = False, preconditioning: str = "frobenius", weight_dimension_numbers: Any = None,
) -> GradientTransformation:
    """The moving average of gradients, each matrix of it with its singular values brought near 1.

        mu = beta mu + (1 - beta) g;    u = newton_schulz(mu_hat),    mu_hat as in `scale_by_adam`

    Args:
        ns_coeffs, ns_steps, preconditioning, eps: as for `newton_schulz`.
        beta: how slowly the average forgets.
        mu_dtype: what mu is kept in; by default as the parameters.
        nesterov: as for `scale_by_adam`.
        adaptive: multiply u by the inner product of mu_hat and u.
        weight_dimension_numbers: a tree, of the parameters' structure or of a prefix of it, of `MuonDimensionNumbers`, or None for
            leaves that stay at mu_hat; or a function that makes it from them. By default leaves of two dims are matrices.

    Raises:
        ValueError: no such preconditioning, or coefficients of another shape.

    Cost: one number kept for each parameter. Flat shards of mu_hat are gathered, a group at a time: (N-1)/N of its bytes sent by
        each rank, which computes all matrices and keeps its own part.

    Source: Jordan et al., kellerjordan.github.io/posts/muon; Bernstein and Newhouse, arXiv 2409.20325.

    >>> opt = scale_by_muon()
    >>> opt.update(torch.tensor([[3., 0.], [0., 4.]]), opt.init(torch.zeros(2, 2)))[0].round(decimals=1)
    tensor([[0.7000, 0.0000],
            [0.0000, 1.1000]])
    """
    if preconditioning not in PRECONDITIONINGS:
        raise ValueError(f"scale_by_muon: preconditioning must be one of {PRECONDITIONINGS}, got {preconditioning!r}")
    coeffs, numbers = torch.tensor(ns_coeffs), dimension_numbers(weight_dimension_numbers)
    if coeffs.dim() > 2 or coeffs.shape[-1] != 3 or (coeffs.dim() == 2 and len(coeffs) > ns_steps):
        raise ValueError(f"scale_by_muon: ns_coeffs must be 3, or at most ns_steps={ns_steps} rows of 3, got {tuple(coeffs.shape)}")

    def init(params: Any) -> MuonState:
        count = new_count(params)
        return MuonState(count, zeros(params, mu_dtype), coeffs.to(count.device, copy=True))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mu, count = update_moment(updates, state.mu, beta), increment(state.count)

        def one(dims: MuonDimensionNumbers | None, x: Tensor) -> tuple[Tensor]:
            if dims is None:
                return (x,)
            u = on_matrices(lambda m: newton_schulz(m, state.ns_coeffs, ns_steps, preconditioning, eps), x, dims)
            return ((x.conj() * u).sum() * u if adaptive else u,)

        mean = debiased_mean(updates, mu, beta, count, nesterov)
        out, = on_whole(one, spread(numbers, updates, is_leaf=_is_numbers), mean)
        return cast_like(out, updates), MuonState(count, cast_like(mu, state.mu), state.ns_coeffs)

    return GradientTransformation(init, update)


def scale_by_shape(weight_dimension_numbers: Any = None, consistent_rms: Number | None = None) -> GradientTransformation:
    """Scale each matrix's update by its shape.

        u sqrt(max(1, columns / rows)),    or u sqrt(max(rows, columns)) consistent_rms

    Args:
        weight_dimension_numbers: as for `scale_by_muon`; `reduction_axis` are the rows, `output_axis` the columns.
        consistent_rms: the root mean square that updates come to have.

    Source: Liu et al., arXiv 2502.16982.

    >>> scale_by_shape().update(torch.ones(1, 4), ())[0]
    tensor([[2., 2., 2., 2.]])
    """
    numbers = dimension_numbers(weight_dimension_numbers)

    def factor(x: Tensor, dims: MuonDimensionNumbers | None) -> Any:
        if dims is None:
            return 1.0
        fan_in, fan_out = (math.prod(x.shape[i] for i in some) for some in normalized(dims, x))
        if consistent_rms is None:
            return max(1, fan_out / max(fan_in, 1)) ** 0.5
        return max(fan_in, fan_out) ** 0.5 * consistent_rms

    def run(updates: Any, params: Any) -> Any:
        dims = spread(numbers, updates, is_leaf=_is_numbers)
        shapes = spread(_itself, updates)
        return by_leaf(times, [factor(x, d) for x, d in zip(shapes, dims, strict=True)], updates)

    return stateless(run)


def muon(
    learning_rate: NumberOrSchedule, ns_coeffs: Any = STANDARD, ns_steps: int = 5, beta: Number = 0.95, eps: Number = 1e-8,
    weight_decay: NumberOrSchedule = 0.0, weight_decay_mask: Mask | None = None, mu_dtype: torch.dtype | None = None,
    *, nesterov: bool = True, adaptive: bool = False, preconditioning: str = "frobenius", adam_b1: Number = 0.9,
    adam_b2: Number = 0.999, adam_eps_root: Number = 0.0, adam_weight_decay: NumberOrSchedule = 0.0,
    adam_learning_rate: NumberOrSchedule | None = None, muon_weight_dimension_numbers: Any = None,
    consistent_rms: Number | None = None,
) -> GradientTransformation:
    """Muon for matrices, Adam for all else.

        p - learning_rate (sqrt(max(1, columns / rows)) newton_schulz(mu_hat) + weight_decay p)

    Args:
        learning_rate: a number or a schedule.
        ns_coeffs: as for `scale_by_muon`, or "standard" or "dion".
        ns_steps, beta, eps, mu_dtype, nesterov, adaptive, preconditioning: as for `scale_by_muon`.
        weight_decay, weight_decay_mask: as for `add_decayed_weights`, of matrices.
        adam_b1, adam_b2, adam_eps_root, adam_weight_decay: as for `adamw`, of all else, with `eps`, `mu_dtype` and `nesterov`.
        adam_learning_rate: of all else; by default `learning_rate`.
        muon_weight_dimension_numbers: as for `scale_by_muon`'s `weight_dimension_numbers`: Adam takes the leaves where it is None.
        consistent_rms: as for `scale_by_shape`.

    Returns:
        A transformation whose state is `PartitionState({"muon": MaskedState(...), "adam": MaskedState(...)})`.

    Cost: one number kept for each element of a matrix, two for all else. Flat shards of matrices are gathered as for
        `scale_by_muon`.

    Source: Jordan et al., kellerjordan.github.io/posts/muon.

    >>> opt = muon(.1)
    >>> params = {"b": torch.zeros(2), "w": torch.zeros(2, 2)}
    >>> opt.update({"b": torch.ones(2), "w": torch.eye(2)}, opt.init(params), params)[0]["b"]
    tensor([-0.1474, -0.1474])
    """
    numbers = muon_weight_dimension_numbers
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in PRESETS:
            raise ValueError(f"muon: ns_coeffs must be one of {list(PRESETS)}, or numbers, got {ns_coeffs!r}")
        ns_coeffs = PRESETS[ns_coeffs]
    matrices = chain(
        scale_by_muon(
            ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov=nesterov, adaptive=adaptive, preconditioning=preconditioning,
            weight_dimension_numbers=numbers,
        ),
        scale_by_shape(numbers, consistent_rms), add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_learning_rate(learning_rate),
    )
    others = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype,
        adam_weight_decay, nesterov=nesterov,
    )
    return partition({"muon": matrices, "adam": others}, lambda params: _labels(numbers, params))


# ---------------------------------------------------------------- matrices in leaves
def dimension_numbers(numbers: Any) -> Callable[[Any], Any]:
    """The dimension numbers of leaves, as a function of the tree."""
    return _two_dims if numbers is None else as_function(numbers)


def _itself(tree: Any) -> Any:
    return tree


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def _two_dims(params: Any) -> Any:
    return tree_map(lambda p: MuonDimensionNumbers() if p.dim() == 2 else None, params)


def _labels(numbers: Any, params: Any) -> Any:
    made = dimension_numbers(numbers)(params)
    label = lambda n: "adam" if n is None else "muon"
    return tree_map(lambda n, sub: tree_map(lambda _: label(n), sub), made, params, is_leaf=_is_numbers)


def normalized(dims: MuonDimensionNumbers, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of rows and of columns, from 0."""
    as_tuple = lambda some: tuple(i % x.dim() for i in ((some,) if isinstance(some, int) else some))
    return as_tuple(dims.reduction_axis), as_tuple(dims.output_axis)


def on_matrices(f: Callable[[Tensor], Tensor], x: Tensor, dims: MuonDimensionNumbers) -> Tensor:
    """f of a leaf as (matrices, rows, columns), and the leaf's form again."""
    rows, columns = normalized(dims, x)
    if x.dim() < 2 or set(rows) & set(columns):
        raise ValueError(f"muon: {dims} are no rows and columns of a leaf of shape {tuple(x.shape)}")
    order = (*(i for i in range(x.dim()) if i not in (*rows, *columns)), *rows, *columns)
    y = x.permute(order)
    size = lambda some: math.prod(x.shape[i] for i in some)
    out = f(y.reshape(-1, size(rows), size(columns)) if x.numel() else y.reshape(0, size(rows), size(columns)))
    return out.reshape(y.shape).permute(tuple(order.index(i) for i in range(x.dim())))
