"""Signs of gradients: sign descent, Signum."""

import torch

from fspeed.optim.base import GradientTransformation, Number, NumberOrSchedule, stateless_with_tree_map
from fspeed.optim.combine import chain
from fspeed.optim.ema import ema
from fspeed.optim.scale import scale_by_learning_rate


def scale_by_sign() -> GradientTransformation:
    """The sign of each element.

        sign(u)

    >>> scale_by_sign().update(torch.tensor([2., 0., -.1]), ())[0]
    tensor([ 1.,  0., -1.])
    """
    return stateless_with_tree_map(lambda u, p: u.sgn())


def sign_sgd(learning_rate: NumberOrSchedule) -> GradientTransformation:
    """Descent by the signs of gradients.

        p - learning_rate sign(g)

    Args:
        learning_rate: a number or a schedule.

    Source: Bernstein et al., arXiv 1802.04434.

    >>> opt = sign_sgd(.5)
    >>> opt.update(torch.tensor([2., 0., -.1]), opt.init(torch.zeros(3)))[0]
    tensor([-0.5000, -0.0000,  0.5000])
    """
    return chain(scale_by_sign(), scale_by_learning_rate(learning_rate))


def signum(
    learning_rate: NumberOrSchedule, beta: Number = 0.9, accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Descent by the signs of gradients' moving averages.

        m = beta m + (1 - beta) g;    p - learning_rate sign(m)

    Args:
        learning_rate: a number or a schedule.
        beta: how slowly the average forgets.
        accumulator_dtype: what it is kept in; by default as the parameters.

    Cost: one number kept for each parameter.

    Source: Bernstein et al., arXiv 1802.04434.

    >>> opt = signum(.5)
    >>> opt.update(torch.tensor([2., -.1]), opt.init(torch.zeros(2)))[0]
    tensor([-0.5000,  0.5000])
    """
    return chain(ema(beta, False, accumulator_dtype), scale_by_sign(), scale_by_learning_rate(learning_rate))
