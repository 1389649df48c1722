"""Angles behind cosines: exact values, capped derivatives."""

import math

import mpmath
import pytest
import torch

from qmargin.maths.angles import SMALLEST_SINE, as_working, sine, widened_cosines

END_COSINES = (1.0, 1 - 2**-24, 1 - 2**-20, 0.999, 0.3, 0.0, -0.7, -1 + 2**-23, -1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sine_is_exact_up_to_the_ends(dtype):
    cosines = torch.tensor(END_COSINES, dtype=dtype)
    with mpmath.workdps(40):
        truth = [float(mpmath.sqrt(1 - mpmath.mpf(c) ** 2)) for c in cosines.tolist()]
    expected = torch.tensor(truth, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(sine(cosines), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivative_of_the_sine_is_capped_and_otherwise_true(dtype):
    cosines = torch.tensor([*END_COSINES, 1 - 1e-9], dtype=dtype, requires_grad=True)
    sine(cosines).sum().backward()
    c = cosines.detach().double()
    truth = -c / (1 - c).mul(1 + c).sqrt().clamp_min(SMALLEST_SINE)
    torch.testing.assert_close(cosines.grad.double(), truth, rtol=1e-5, atol=0.0)


def test_half_precision_works_in_float32_and_double_stays():
    assert as_working(torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert as_working(torch.zeros(2, dtype=torch.float16)).dtype == torch.float32
    assert as_working(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64


def test_widened_cosines_take_one_margin_per_row():
    cosines = torch.tensor([0.3, 0.3, -0.95], dtype=torch.float64)
    margins = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    expected = [0.3, math.cos(math.acos(0.3) + 0.5), -0.95 - 1 + math.cos(0.5)]
    torch.testing.assert_close(
        widened_cosines(cosines, margins), torch.tensor(expected, dtype=torch.float64)
    )
