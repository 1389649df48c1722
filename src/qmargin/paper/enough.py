"""Whether pictures that were given make enough pairs, before anything is trained on them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qmargin.demo.recipe import SIZES
from qmargin.demo.run import DemoOptions, find_device
from qmargin.errors import DataError
from qmargin.evaluation.all_pairs import num_impostor_pairs


def pairs_needed(far: float) -> int:
    """Impostor pairs of which a false acceptance rate allows one.

    Examples:
        >>> pairs_needed(1e-5)
        100000
    """
    return round(1.0 / far)


def check_pairs(options: DemoOptions, far: float) -> None:
    """Refuse pictures whose test identities make too few impostor pairs for a rate.

    Args:
        options: Of the trainings; without a path of pictures there are always enough.
        far: The largest rate that is shown. Stricter ones may be missing, which captions say.

    Raises:
        DataError: With the pairs that there are and those that are needed.
    """
    if options.data is None:
        return
    from qmargin.demo.stored import INDEX, read_stored
    from qmargin.demo.worlds import stored_world

    with TemporaryDirectory() as scratch:  # what is refused leaves nothing in the folder
        stored = read_stored(options.data, Path(scratch) / INDEX)
    size, needed = SIZES[find_device(options.device)], pairs_needed(far)
    for seed in range(options.seeds):
        number = num_impostor_pairs(np.bincount(stored_world(stored, size, seed).test.labels))
        if number < needed:
            raise DataError(
                f"the test identities of {options.data} make {number:,} impostor pairs with seed "
                f"{seed}, and FAR {far:g} needs at least {needed:,}; give more identities or more "
                "pictures of them, or leave --data out"
            )
