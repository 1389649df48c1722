"""The search behind the demo's settings: the same effort for every loss, no test identity.

``python -m qmargin.demo.search --out search.jsonl`` trains every entry of ``GRID`` by the demo's
recipe in a world of its own and measures it on validation identities. It can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qmargin.demo.losses import GRID, LOSSES, DemoLoss
from qmargin.demo.recipe import SIZES, Size, demo_recipe

WORLD = 1000  # a seed that no demo uses
FARS = (1e-2, 1e-3, 1e-4, 1e-5)


def run_search(out: Path, keys: Sequence[str], size: Size) -> list[dict[str, Any]]:
    """Measure what ``out`` does not hold yet; it gets one JSON object per line."""
    done = _read(out)
    for key in keys:
        for alpha, scale, margin in GRID[key]:
            loss = LOSSES[key]._replace(alpha=alpha, scale=scale, margin=margin)
            if any(_is_of(record, loss, size) for record in done):
                continue
            record = {**loss._asdict(), "epochs": size.epochs, **_measured(loss, size)}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            done.append(record)
    return done


def _measured(loss: DemoLoss, size: Size) -> dict[str, float]:
    """EER and TARs on validation identities after a training."""
    from qmargin.data.strokes import StrokeIdentities
    from qmargin.demo.embed import embed_pictures
    from qmargin.evaluation.all_pairs import evaluate_all_pairs
    from qmargin.training.loop import train

    recipe = demo_recipe(loss, seed=WORLD, size=size)
    validation = StrokeIdentities(size.num_test, size.samples_test, seed=WORLD, split="validation")
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(recipe, folder)
        if outcome.signal or outcome.checkpoint is None:
            raise KeyboardInterrupt
        embeddings = embed_pictures(recipe, outcome.checkpoint, validation)
    found = evaluate_all_pairs(embeddings, validation.labels, FARS, num_hardest=0)
    return {"eer": found.eer.eer, **{f"{point.far_target:g}": point.tar for point in found.tar}}


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _is_of(record: dict[str, Any], loss: DemoLoss, size: Size) -> bool:
    wanted = {**loss._asdict(), "epochs": size.epochs}
    return all(record[name] == value for name, value in wanted.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="results so far")
    parser.add_argument("--losses", nargs="+", choices=tuple(GRID), default=tuple(GRID))
    parser.add_argument("--epochs", type=int, default=SIZES["cpu"].epochs, help="of each training")
    arguments = parser.parse_args(argv)
    size = SIZES["cpu"]._replace(epochs=arguments.epochs)
    run_search(arguments.out, arguments.losses, size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
