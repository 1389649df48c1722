"""Results of made-up systems: drawn from two normal distributions, read by plain definitions."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np

from qmargin.evaluation import result as r

FARS = (1e-2, 1e-3, 1e-4, 1e-5)
HOSTILE = [
    '<img src=x onerror="window.__pwned=1">',
    "</script><script>window.__pwned=1</script>",
    "\"'><svg/onload=window.__pwned=1>",
    "javascript:window.__pwned=1//<!--",
    "$\\frac{1}{$ _under & #1 %~^ {x}",
    "=cmd|' /C calc'!A0",
    "right\u202eto left\x00\n\ud800 end",
]


def write_results(folder: Path, *results: r.Result) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"system{index}.json" for index in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        r.write_result(path, result)
    return paths


def synthetic_result(
    name: str = "Q-Margin",
    *,
    separation: float = 5.0,
    num_genuine: int = 2000,
    num_impostors: int = 200_000,
    seed: int = 0,
    protocol: str = "VoxCeleb1-H",
    card: dict[str, str] | None = None,
    groups: tuple[str, ...] = (),
    keys: tuple[str, ...] = (),
    num_replicates: int = 200,
    run: r.RunInfo | None = None,
) -> r.Result:
    """A system whose genuine scores lie ``separation`` deviations above the impostors."""
    genuine, impostor, parts = _measured(separation, num_genuine, num_impostors, seed)
    measures: r.Measures = parts["measures"]
    noise = np.random.default_rng(7).standard_normal(num_replicates)
    own = np.random.default_rng(seed + 100).standard_normal(num_replicates)
    shake = 0.004 * (noise + 0.3 * own)
    digest = hashlib.sha256(f"{protocol} {num_genuine} {num_impostors}".encode()).hexdigest()
    info = r.ProtocolInfo(
        name=protocol,
        kind="trials",
        rule="conservative",
        scoring="cosine",
        data_sha256=digest,
        num_trials=num_genuine + num_impostors,
        num_genuine=num_genuine,
        num_impostors=num_impostors,
        num_subjects=1190,
        interval=r.IntervalMethod("subject bootstrap", 0.95, num_replicates, 0),
    )
    return r.Result(
        system=r.System(name, card),
        run=run,
        protocol=info,
        sources=(r.Source(f"scores/{name}.tsv", digest, "scores"),),
        **parts,
        replicates=_replicates(measures.tar, shake, digest),
        groups=_groups(groups, np.random.default_rng(seed + 1)) if groups else None,
        hardest=_hardest(keys, genuine, impostor) if keys else None,
        created="2026-01-15T12:00:00+00:00",
        command="qmargin evaluate scores FILE --out result.json",
        qmargin="0.1.0",
    )


@cache
def _measured(
    separation: float, num_genuine: int, num_impostors: int, seed: int
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Sorted scores, and what is measured on them."""
    generator = np.random.default_rng(seed)
    genuine = np.sort(0.1 * (generator.standard_normal(num_genuine) + separation))
    impostor = np.sort(0.1 * generator.standard_normal(num_impostors))
    tar = tuple(_tar_point(genuine, impostor, far) for far in FARS)
    parts = {
        "measures": _measures(genuine, impostor, tar),
        "det": _det(genuine, impostor),
        "histogram": _histogram(genuine, impostor),
        "calibration": _calibration(genuine, impostor),
    }
    return genuine, impostor, parts


def some_run(arm: str = "q_margin", seed: int = 0, **changes: object) -> r.RunInfo:
    """A run of made-up settings."""
    values = {
        "recipe_sha256": hashlib.sha256(repr((arm, seed)).encode()).hexdigest(),
        "arm": arm,
        "title": arm,
        "divergence": "alpha",
        "alpha": 1.25,
        "margins": (r.MarginInfo("prior", 0.2),),
        "scale": 32.0,
        "seed": seed,
        "epochs": 20.0,
    }
    return r.RunInfo(**{**values, **changes})  # type: ignore[arg-type]


def hostile_result(index: int = 0) -> r.Result:
    """Everything that is text is an attack."""
    attack = HOSTILE[index % len(HOSTILE)]
    base = synthetic_result(
        attack,
        protocol=HOSTILE[0],
        seed=index,
        card={attack: attack, "alpha": attack},
        groups=tuple(HOSTILE[:4]),
        keys=tuple(HOSTILE),
    )
    interval = replace(base.protocol.interval, note=attack)
    return replace(
        base,
        protocol=replace(base.protocol, rule=attack, interval=interval, kind=attack),
        run=some_run(attack, title=attack, divergence=attack, device=attack),
        measures=replace(base.measures, extra={attack: r.Measure(0.5, note=attack)}),
        sources=(r.Source(attack, attack, attack),),
        created=attack,
        command=attack,
        qmargin=attack,
    )


def _tar_point(genuine: np.ndarray, impostor: np.ndarray, far: float) -> r.TarPoint:
    allowed = int(far * len(impostor) + 1e-9)
    if allowed < 1:
        return r.TarPoint(far, None, None, None, 0, None, "not measurable", allowed)
    edge = impostor[::-1][allowed]
    threshold = float(np.nextafter(edge, np.inf))
    tar = float((genuine > edge).mean())
    accepts = int((impostor > edge).sum())
    interval = (max(tar - 0.012, 0.0), min(tar + 0.011, 1.0))
    status = "ok" if allowed >= 30 else "few"
    return r.TarPoint(
        far, tar, interval, accepts / len(impostor), accepts, threshold, status, allowed
    )


def _measures(genuine: np.ndarray, impostor: np.ndarray, tar: tuple[r.TarPoint, ...]) -> r.Measures:
    middle = float((genuine.mean() + impostor.mean()) / 2)
    eer = float((impostor >= middle).mean() + (genuine < middle).mean()) / 2
    costs = tuple(
        r.DcfPoint(p, min(1.0, 40 * eer * (1 - p)), (30 * eer, min(1.0, 50 * eer)), middle)
        for p in (0.01, 0.05)
    )
    eer_point = r.EerPoint(eer, (0.9 * eer, 1.1 * eer), middle)
    return r.Measures(tar, eer_point, costs, r.Value(0.0712), r.Value(0.0433))


def _det(genuine: np.ndarray, impostor: np.ndarray, points: int = 400) -> r.Det:
    falling = impostor[::-1]
    counts = np.unique(np.geomspace(1, len(falling), points - 1).astype(int))
    thresholds = falling[counts - 1]
    far = counts / len(falling)
    frr = np.searchsorted(genuine, thresholds) / len(genuine)
    grid = np.geomspace(1 / len(falling), 0.5, 60)
    centre = np.interp(np.log(grid), np.log(far), frr)
    spread = 1.96 * np.sqrt(centre * (1 - centre) / len(genuine)) + 0.08 * centre
    ends = (np.clip(centre + side * spread, 0, 1) for side in (-1, 1))
    band = r.Band(*(tuple(values.tolist()) for values in (grid, *ends)))
    columns = ((0.0, *far.tolist()), (1.0, *frr.tolist()), (float("inf"), *thresholds.tolist()))
    return r.Det(*columns, band)


def _histogram(genuine: np.ndarray, impostor: np.ndarray) -> r.Histogram:
    both = np.concatenate([genuine, impostor])
    edges = np.linspace(both.min(), both.max(), 65)
    counts = [np.histogram(part, edges)[0].tolist() for part in (genuine, impostor)]
    return r.Histogram(tuple(edges.tolist()), tuple(counts[0]), tuple(counts[1]))


def _calibration(genuine: np.ndarray, impostor: np.ndarray) -> r.CalibrationCurve:
    scale = float((genuine.mean() - impostor.mean()) / 0.01)
    offset = -scale * float(genuine.mean() + impostor.mean()) / 2
    predicted = [1 / (1 + np.exp(-(scale * part + offset))) for part in (genuine, impostor)]
    edges = np.linspace(0, 1, 11)
    hits, misses = (np.histogram(part, edges)[0] / len(part) for part in predicted)
    total = hits + misses
    middles = (edges[1:] + edges[:-1]) / 2
    observed = [float(h / t) if t else None for h, t in zip(hits, total, strict=True)]
    reliability = r.Reliability(
        tuple(edges.tolist()),
        tuple(None if o is None else float(m) for m, o in zip(middles, observed, strict=True)),
        tuple(observed),
        tuple(int(1000 * t) for t in total),
    )
    return r.CalibrationCurve(scale, offset, reliability)


def _replicates(tar: tuple[r.TarPoint, ...], shake: np.ndarray, digest: str) -> r.ReplicateValues:
    values = {
        r.far_key(point.far_target): tuple((point.tar + shake * (1 + i / 2)).tolist())
        for i, point in enumerate(tar)
        if point.tar is not None
    }
    return r.ReplicateValues(digest, 0, values, tuple((0.02 - shake / 8).tolist()))


def _groups(names: tuple[str, ...], generator: np.random.Generator) -> r.GroupAudit:
    rows = []
    for index, name in enumerate(names):
        fmr = float(1e-3 * np.exp(0.7 * generator.standard_normal())) if index else 0.0
        status = "few" if index == 0 else "ok"
        rows.append(r.GroupRow(name, fmr, 0.02 + 0.01 * index, 500, 40_000, status))
    spread = r.GroupSpread(1.83, 2.71, 0.214)
    least = replace(spread, max_over_geomean=None)
    return r.GroupAudit(0.31, 1e-3, tuple(rows), least, None, spread)


def _hardest(keys: tuple[str, ...], genuine: np.ndarray, impostor: np.ndarray) -> r.Hardest:
    def pairs(scores: np.ndarray) -> tuple[r.HardPair, ...]:
        following = keys[1:] + keys[:1]
        together = zip(keys, following, scores, strict=False)
        return tuple(r.HardPair(enrol, test, float(score)) for enrol, test, score in together)

    return r.Hardest(pairs(impostor[::-1]), pairs(genuine))


def words_of(page: str) -> str:
    """The sentences of a report's page, without what keeps their words on a line."""
    return unescape(re.sub(r"</?span[^>]*>", "", page)).replace("\u00a0", " ")
