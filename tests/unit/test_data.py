"""Decoders: what goes in comes out, and what cannot be read is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from understudy.data.images import labelled_images
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.errors import InvalidData

IMAGES = np.zeros((6, 8, 8), np.uint8)
LABELS = np.arange(6) % 2


def test_digits_are_split_as_stated():
    digits = read_source("digits")
    assert len(digits.images) == 1438
    assert len(digits.test.images) == 359
    assert digits.is_public_benchmark
    assert digits.name == digits.test.name == "digits"
    pixels = digits.images / 255
    assert digits.normalisation.mean[0] == pytest.approx(pixels.mean(), abs=0.005)
    assert digits.normalisation.std[0] == pytest.approx(pixels.std(), abs=0.005)


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.tuples(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(4, 9), st.integers(4, 9)),
        elements=st.floats(0, 1, width=32),
    )
)
def test_float_pixels_keep_eight_bits(images):
    data = labelled_images(images, np.zeros(len(images), int), classes=2)
    assert np.abs(data.images / 255 - images).max() <= 0.5 / 255 + 1e-6


def written(tmp_path, **arrays):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, "no array 'labels'"),
        ({"images": IMAGES, "labels": LABELS[:5]}, "one label per image"),
        ({"images": IMAGES, "labels": LABELS * 2 - 1}, "label -1 of image 0"),
        ({"images": IMAGES, "labels": LABELS, "classes": ["a"]}, "1 classes"),
        ({"images": IMAGES, "labels": LABELS + 0.5}, "float64"),
        ({"images": IMAGES * 1.0 + np.nan, "labels": LABELS}, "NaN"),
        ({"images": IMAGES - 1.0, "labels": LABELS}, r"-1 to 0"),
        ({"images": IMAGES + 255.0, "labels": LABELS}, r"255"),
        ({"images": IMAGES.astype(np.int32), "labels": LABELS}, "int32"),
        ({"images": IMAGES[0], "labels": LABELS}, "shape"),
        ({"images": np.zeros((6, 2, 8, 8), np.uint8), "labels": LABELS}, "1 or 3 channels"),
        ({"images": IMAGES[:, :2], "labels": LABELS}, "2 x 8 pixels"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "no images"),
        ({"images": IMAGES, "labels": LABELS * 2000}, "2001 classes"),
        ({"images": np.array([None] * 6), "labels": LABELS}, "Python objects"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, message):
    with pytest.raises(InvalidData, match=message):
        read_source(written(tmp_path, **arrays))


def test_labels_outside_declared_classes_are_refused(tmp_path):
    with pytest.raises(InvalidData, match="label 3 of image 3 is outside 0 to 2"):
        labelled_images(IMAGES, np.arange(6), classes=3)
    with pytest.raises(InvalidData, match="to take values from"):
        read_source(written(tmp_path, images=IMAGES, labels=LABELS), Reading(unit="patient"))
    with pytest.raises(InvalidData, match="units have shape"):
        labelled_images(IMAGES, LABELS, units=[1, 2])


def test_a_truncated_npz_is_refused(tmp_path):
    path = written(tmp_path, images=IMAGES, labels=LABELS)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InvalidData, match="cannot be read"):
        read_source(path)


def test_labels_may_be_names():
    names = np.array(["10", "9", "9", "10", "9", "9"])
    data = labelled_images(IMAGES, names)
    assert data.class_names == ("9", "10")
    assert data.labels.tolist() == [1, 0, 0, 1, 0, 0]
    other = labelled_images(IMAGES, names, classes=("8", "9", "10"))
    assert other.labels.tolist() == [2, 1, 1, 2, 1, 1]
    with pytest.raises(InvalidData, match="label '10' is not one of the classes"):
        labelled_images(IMAGES, names, classes=("8", "9"))
    with pytest.raises(InvalidData, match="name 2 classes"):
        labelled_images(IMAGES, names, classes=5)


def test_pixels_that_are_ready_are_not_copied():
    ready = np.zeros((4, 1, 8, 8), np.uint8)
    assert labelled_images(ready, [0, 1, 0, 1]).images is ready
