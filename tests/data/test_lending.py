"""Memory of batches: filled again when nobody looks at it, and never before."""

import gc

import numpy as np
import pytest
import torch

from qmargin.data.lending import Borrower, Layout, Lender
from qmargin.data.loader import build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.synthetic import SyntheticIdentities

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one or two cores

PICTURE = np.zeros((4, 5, 3), dtype=np.uint8).transpose(2, 0, 1)


def test_rows_are_laid_out_as_inputs_are() -> None:
    layout = Layout.of(7, PICTURE)
    room = layout.on(torch.empty(layout.num_bytes, dtype=torch.uint8))
    assert room.shape == (7, 3, 4, 5)
    assert room.dtype == torch.uint8
    assert room.is_contiguous(memory_format=torch.channels_last)
    floats = Layout.of(3, np.zeros((2, 5)))
    room = floats.on(torch.empty(floats.num_bytes, dtype=torch.uint8))
    assert (room.shape, room.dtype, room.is_contiguous()) == ((3, 2, 5), torch.float64, True)


def test_a_piece_is_lent_again_when_the_last_tensor_on_it_is_gone() -> None:
    borrower = Borrower(1, 2)
    lender = Lender(borrower.is_lent, reader=borrower.number, worker=0)
    layout = Layout.of(2, PICTURE)
    room, parcel = lender.lend(layout)
    room.fill_(7)
    assert parcel is not None
    assert parcel.memory is not None  # sent once
    view = parcel.unpacked()[1, :, 2:]
    other = lender.lend(layout)[1]
    assert other is not None
    assert other.piece != parcel.piece
    assert lender.lend(layout)[1] is None  # all are lent
    assert (view == 7).all()
    del view
    gc.collect()
    again = lender.lend(layout)[1]
    assert again is not None
    assert (again.piece, again.memory) == (parcel.piece, None)


def test_a_larger_batch_gets_a_larger_piece() -> None:
    borrower = Borrower(1, 1)
    lender = Lender(borrower.is_lent, reader=borrower.number, worker=0)
    first = lender.lend(Layout.of(2, PICTURE))[1]
    assert first is not None
    first.unpacked()  # and let go of at once
    room, second = lender.lend(Layout.of(20, PICTURE))
    assert second is not None
    assert second.memory is not None
    room.fill_(9)
    assert (second.unpacked() == 9).all()


@pytest.mark.parametrize("num_kept", [1, 3, 20])
def test_batches_that_are_kept_do_not_change(num_kept: int) -> None:
    """Kept ones would be overwritten if their memory were lent to a worker again."""
    dataset, order = SyntheticIdentities(40, 5, shape=(6,)), GlobalOrder(200, seed=1, batch_size=10)
    with build_loader(dataset, order, stop_step=20) as stream:
        expected = [batch.inputs for batch in stream]
    kept: list[torch.Tensor] = []
    with build_loader(dataset, order, stop_step=20, num_workers=2) as stream:
        for step, batch in enumerate(stream):
            kept = [*kept, batch.inputs][-num_kept:]
            for inputs, right in zip(kept, expected[: step + 1][-num_kept:], strict=True):
                assert torch.equal(inputs, right)


def test_an_epoch_needs_no_more_memory_than_a_few_batches() -> None:
    """Pieces that were sent are named, not sent again: no file is opened for them."""
    dataset, order = SyntheticIdentities(40, 5, shape=(6,)), GlobalOrder(200, seed=1, batch_size=2)
    places = set()
    with build_loader(dataset, order, stop_step=100, num_workers=2, prefetch=2) as stream:
        for batch in stream:
            places.add(batch.inputs.data_ptr())
    assert len(places) <= 2 * (2 + 2)
