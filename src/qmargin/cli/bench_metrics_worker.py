"""One measurement of ``qmargin bench metrics``, in a process of its own: its memory is its own.

Reads a job as JSON from the first argument and writes the result as JSON to standard output.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qmargin.metrics.crossing import eer, min_dcf
from qmargin.metrics.operating import num_allowed, tars_at_fars
from qmargin.metrics.tail import ImpostorTail

Job: TypeAlias = dict[str, Any]
GENUINE_SHIFT = 4.0  # standard deviations between the two kinds of scores
STREAM_STEP = 618_033_989  # visits a stream's values in an order without pattern
GENUINE_STEP = 20  # one genuine score for so many impostors of a stream
MOST_GENUINE = 100_000


def peak_bytes() -> int:
    """Largest memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def make_scores(job: Job) -> NDArray[Any]:
    """Genuine scores first, then impostors, without leaving a trace in the memory's peak."""
    dtype = np.dtype(job["dtype"])
    scores: NDArray[Any] = np.empty(job["scores"], dtype)
    np.random.default_rng(job["seed"]).standard_normal(dtype=dtype.type, out=scores)
    scores[: job["genuine"]] += dtype.type(GENUINE_SHIFT)
    return scores


def read_with_qmargin(scores: NDArray[Any], job: Job) -> list[float]:
    """TAR at each FAR, EER and minDCF by this package."""
    genuine, impostor = scores[: job["genuine"]], scores[job["genuine"] :]
    tars = [point.tar for point in tars_at_fars(genuine, impostor, job["fars"])]
    cost = min_dcf(genuine, impostor, job["p_target"]).min_dcf
    return [*tars, eer(genuine, impostor).eer, cost]


def read_with_sklearn(scores: NDArray[Any], labels: NDArray[np.bool_], job: Job) -> list[float]:
    """The same by the exact recipe on scikit-learn's full ROC curve."""
    from sklearn.metrics import roc_curve

    far, tar, _ = roc_curve(labels, scores, drop_intermediate=False)
    tars = [float(tar[np.searchsorted(far, limit, side="right") - 1]) for limit in job["fars"]]
    frr = 1.0 - tar
    after = int(np.argmax(far >= frr))
    over, short = far[after] - frr[after], frr[after - 1] - far[after - 1]
    crossing = (far[after - 1] * over + far[after] * short) / (over + short)
    prior = job["p_target"]
    cost = (prior * frr + (1.0 - prior) * far).min() / min(prior, 1.0 - prior)
    return [*tars, float(crossing), float(cost)]


def measure_reading(job: Job) -> Job:
    """Seconds, extra memory and values of one contender."""
    scores = make_scores(job)
    read: Callable[[], list[float]]
    if job["contender"] == "sklearn":
        import_module("sklearn.metrics")  # before the baseline is taken

        labels = np.zeros(len(scores), np.bool_)
        labels[: job["genuine"]] = True
        read = partial(read_with_sklearn, scores, labels, job)
    else:
        read = partial(read_with_qmargin, scores, job)
    baseline = peak_bytes()
    start = time.perf_counter()
    values = read()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "extra_bytes": peak_bytes() - baseline, "values": values}


def measure_stream(job: Job) -> Job:
    """Seconds and memory of a stream of the impostors 0, 1, .. N - 1 in a scattered order."""
    total, size = int(job["stream"]), min(int(job["chunk"]), int(job["stream"]))
    step = STREAM_STEP % total
    while math.gcd(step, total) != 1:
        step += 1
    offsets = (np.arange(size, dtype=np.uint64) * np.uint64(step) % np.uint64(total)).astype("u4")
    tail = ImpostorTail(max(job["fars"]), total)
    update_seconds, start = 0.0, time.perf_counter()
    for first in range(0, total, size):
        values = offsets[: total - first] + np.uint32(first * step % total)
        np.minimum(values, values - np.uint32(total), out=values)  # modulo: the wrong one wraps
        scores = values.astype(np.float64)
        began = time.perf_counter()
        tail.update(scores)
        update_seconds += time.perf_counter() - began
    points = [tail.tar_at_far(stream_genuine(total), far) for far in job["fars"]]
    return {
        "update_seconds": update_seconds,
        "seconds": time.perf_counter() - start,
        "peak_bytes": peak_bytes(),
        "tars": [point.tar for point in points],
        "false_accepts": [point.false_accepts for point in points],
        "expected": [expected_tar(far, total) for far in job["fars"]],
        "allowed": [num_allowed(far, total) for far in job["fars"]],
    }


def stream_genuine(total: int) -> NDArray[np.float64]:
    """Genuine scores half a step above every twentieth of the largest impostors."""
    num_genuine = min(MOST_GENUINE, total // GENUINE_STEP + 1)
    return total - 0.5 - GENUINE_STEP * np.arange(num_genuine, dtype=np.float64)


def expected_tar(far: float, total: int) -> float:
    """TAR of a stream in closed form: impostor number k + 1 is ``total - 1 - k``.

    Examples:
        >>> expected_tar(1e-3, 10**9)
        0.50001
    """
    num_genuine = min(MOST_GENUINE, total // GENUINE_STEP + 1)
    return min(num_genuine, num_allowed(far, total) // GENUINE_STEP + 1) / num_genuine


def main() -> None:
    """Run the job of the command line."""
    job = json.loads(sys.argv[1])
    if job["contender"] == "stream":
        result = measure_stream(job)
    elif job["contender"] == "files":
        from qmargin.cli.bench_metrics_files import measure_files

        result = {**measure_files(job), "peak_bytes": peak_bytes()}
    else:
        result = measure_reading(job)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
