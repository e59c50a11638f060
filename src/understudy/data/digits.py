"""The built-in set: scikit-learn's 8 x 8 handwritten digits, a public benchmark.

1797 images. Every fifth (index 4, 9, 14, ...) is the test set: 359 images. The other 1438 are the
records, so N0 = 1438.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from understudy.data.images import LabelledImages, labelled_images

TEST_EVERY = 5


def read_digits() -> LabelledImages:
    """Return the digits, with their test split attached."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    is_test = np.arange(len(bunch.target)) % TEST_EVERY == TEST_EVERY - 1

    def part(rows: NDArray[np.bool_]) -> LabelledImages:
        return labelled_images(bunch.images[rows] / 16, bunch.target[rows], classes=10)

    return replace(part(~is_test), test=part(is_test))
