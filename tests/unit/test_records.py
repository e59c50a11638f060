"""How records are laid out in batches: nobody's absence moves what others add, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from door import records_of, some_images, without
from understudy.privacy.gradients import OneByOne
from understudy.privacy.records import FEW_RECORDS, MOST_RECORDS, View

WEIGHT = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
SIZES: list[int] = []


def features(_, images, labels):
    """Features whose last bits depend on how many images there are at once."""
    SIZES.append(len(images))
    return [OneByOne(lambda image: torch.cos(WEIGHT @ image.flatten()))(images)]


def rows_by_slot(records, how):
    """Return each slot's row (units, 100), and the sizes of batches that were computed."""
    SIZES.clear()
    units = torch.arange(records.unit_count)
    if how == "record_rows":
        found = [rows[0] for rows, _ in records.record_rows(units, features, {}, dimension=100)]
    elif how == "unit_rows":
        found = [rows[0] for rows in records.unit_rows(units, features, {}, dimension=100)]
    else:
        found = []
        for places, counts in records.padded_places(units, MOST_RECORDS):
            (rows,) = records._contributions(places, features, {})
            found.append(torch.where(counts[:, None], rows, 0))
    return torch.cat(found)[: records.unit_count], list(SIZES)


@pytest.mark.parametrize("how", ["record_rows", "unit_rows", "padded_places"])
@pytest.mark.parametrize("count", [7, MOST_RECORDS + 4])
@pytest.mark.parametrize("unit", [0, 5])
def test_an_empty_slot_keeps_its_place(how, count, unit):
    data = some_images(count)
    whole, sizes = rows_by_slot(records_of(data), how)
    empty, same_sizes = rows_by_slot(records_of(without(data, unit)), how)
    assert same_sizes == sizes
    others = torch.arange(count) != unit
    assert torch.equal(whole[others], empty[others])
    assert whole[unit].any()
    assert not empty[unit].any()


@pytest.mark.parametrize("unit", [0, 3])
def test_units_of_several_records_are_computed_in_batches_of_a_public_size(unit):
    """How many records somebody has changes the number of batches, never the size of one."""
    owners = torch.arange(50).remainder(11).sort().values.numpy()
    data = some_images(50, units=owners, unit="patient")
    whole, sizes = rows_by_slot(records_of(data), "unit_rows")
    empty, fewer = rows_by_slot(records_of(without(data, unit)), "unit_rows")
    assert set(sizes) == set(fewer) == {FEW_RECORDS}
    others = torch.arange(11) != unit
    assert torch.allclose(whole[others], empty[others], atol=1e-5)
    assert not empty[unit].any()


def test_where_a_batch_ends_within_a_unit_does_not_round_its_sum():
    """In bfloat16 256 + 1 - 256 is 0 if it is rounded after the second record, else 1."""
    owners = np.repeat(np.arange(12), [1, *[3] * 11])
    data = some_images(len(owners), units=owners, unit="patient")
    values = torch.tensor([-256.0, 256.0, 1.0], dtype=torch.bfloat16)  # classes 1, 2, 0 of a unit

    def cancelling(_, images, labels):
        return [values[labels][:, None]]

    units, found = torch.arange(12), []
    for records in (records_of(data), records_of(without(data, 0))):
        ((rows,),) = records.unit_rows(units, cancelling, {}, dimension=1)
        found.append(rows.flatten())
    assert len(owners) > FEW_RECORDS  # one batch ends in the midst of the last unit
    for sums in found:
        assert sums[1:].tolist() == [1.0] * 11


def test_views_are_computed_in_batches_of_one_size():
    data, sizes = some_images(MOST_RECORDS + 4), []

    def one_by_one(images):
        sizes.append(len(images))
        return images.flatten(1)

    for records in (records_of(data), records_of(without(data, 2))):
        seen = records.through(View(lambda image: image.flatten()), one_by_one)
        (rows,) = seen.unit_rows(
            torch.tensor([9]), lambda _, shown, labels: [shown], {}, dimension=64
        )
        assert torch.equal(rows[0][0], torch.from_numpy(data.images[9]).flatten() / 255)
    assert sizes == [MOST_RECORDS] * 4


def test_a_set_whose_slots_are_all_empty_adds_nothing():
    records = records_of(some_images(3))
    nobody = type(records)(
        records._images, records._labels, records._places[:0], torch.zeros(4, dtype=torch.int64),
        one_each=True,
    )  # fmt: skip
    units = torch.arange(3)
    assert not list(nobody.unit_rows(units, features, {}, dimension=100))
    assert not list(nobody.record_rows(units, features, {}, dimension=100))
    ((places, counts),) = nobody.padded_places(units, 8)  # to be computed; nothing counts
    assert places.shape == counts.shape == (8,)
    assert not counts.any()
    shown = nobody.through(View(lambda image: image.flatten()), lambda images: images.flatten(1))
    ((places, counts),) = shown.padded_places(units, 8)
    assert shown._images[places].shape == (8, 64)
    assert not counts.any()
