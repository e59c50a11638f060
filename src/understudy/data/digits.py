"""The built-in set: scikit-learn's 8 x 8 handwritten digits, a public benchmark.

1797 images. Every fifth (index 4, 9, 14, ...) is the test set: 359 images. The other 1438 are the
records, so N0 = 1438.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from understudy.data.images import LabelledImages, Normalisation, labelled_images

NORMALISATION = Normalisation(mean=(0.305,), std=(0.376,))
TEST_EVERY = 5


def read_digits() -> LabelledImages:
    """Return the digits, with their test split attached."""
    bunch = load_digits()
    is_test = np.arange(len(bunch.target)) % TEST_EVERY == TEST_EVERY - 1

    def part(rows: NDArray[np.bool_]) -> LabelledImages:
        return labelled_images(
            bunch.images[rows] / 16,
            bunch.target[rows],
            classes=10,
            name="digits",
            source="digits",
            normalisation=NORMALISATION,
            is_public_benchmark=True,
        )

    return replace(part(~is_test), test=part(is_test))
