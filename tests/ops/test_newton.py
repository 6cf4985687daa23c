"""Newton and Schulz's iteration: singular values, other shapes and dtypes."""
import pytest
import torch

from fspeed.ops.newton import STANDARD, newton_schulz
from fspeed.optim.muon import newton_schulz as fspeeds


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (2, 3, 6, 4), (0, 3, 4), (1, 1)], ids=str)
def test_the_polynomial_is_that_of_the_singular_values(shape):
    x, coefficients = torch.randn(shape, dtype=torch.float64), [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5)]
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(newton_schulz(x, coefficients, eps=0.0), u @ torch.diag_embed(s) @ v)


def test_the_same_as_fspeeds():
    x = torch.randn(3, 8, 20)
    torch.testing.assert_close(newton_schulz(x), fspeeds(x, torch.tensor(STANDARD)), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_near():
    x = torch.randn(16, 40)
    assert newton_schulz(x.bfloat16()).dtype == torch.bfloat16
    assert (newton_schulz(x.bfloat16()).float() - newton_schulz(x)).norm() < 0.05 * newton_schulz(x).norm()


def test_mistakes_are_told():
    eye = torch.eye(2)
    for x, coefficients in ((torch.ones(3), (1, 2, 3)), (eye, (1, 2)), (eye, (1, 2, 3, 4, 5, 6)), (eye, [])):
        with pytest.raises(ValueError, match="matrices and"):
            newton_schulz(x, coefficients)
