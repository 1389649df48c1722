"""A metric: the distance between genuine and impostor scores in deviations."""

import numpy as np
from numpy.typing import NDArray


def d_prime(genuine: NDArray[np.floating], impostor: NDArray[np.floating]) -> float:
    """Difference of the mean scores over their joint deviation."""
    spread = np.sqrt(0.5 * (genuine.var() + impostor.var()))
    return float((genuine.mean() - impostor.mean()) / spread)
