"""The second door: real records without noise, for evaluation. Each use enters the ledger first.

What is computed from them is private: it belongs into `private/`, never into `release/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.data.images import LabelledImages
from understudy.errors import InvalidData
from understudy.privacy.ledger import Ledger
from understudy.privacy.vault import Vault


@dataclass(frozen=True, repr=False)
class RealImages:
    """Real records in the clear."""

    images: Tensor
    """(n, c, h, w), uint8."""
    labels: Tensor
    what: str
    """Where they come from, in words."""


def disclose_hold_out(vault: Vault, ledger: Ledger, *, purpose: str) -> RealImages:
    """Return the held-out units of a registered data set."""
    registration = vault.registration
    if not registration.hold_out:
        raise InvalidData(
            f"'{registration.name}' was registered without a hold-out, so there is nothing to "
            "evaluate on; pass --test with a test set, or register with --hold-out next time"
        )
    ledger.disclose(registration.id, what="hold-out", purpose=purpose)
    images, labels = vault._held_out.all_in_the_clear()
    return RealImages(images, labels, f"hold-out of {registration.name}")


def disclose_training_records(vault: Vault, ledger: Ledger, *, purpose: str) -> RealImages:
    """Return the very records that a method learns from: no held-out units, no more than the cap.

    The most delicate of all readings: whoever sees what is computed from these learns something of
    the training records, whatever epsilon the certificate states.
    """
    registration = vault.registration
    ledger.disclose(registration.id, what="training records", purpose=purpose)
    images, labels = vault._records.all_in_the_clear()
    return RealImages(images, labels, f"training records of {registration.name}")


def disclose_test_set(
    data: LabelledImages, ledger: Ledger, *, data_set: int | None, purpose: str
) -> RealImages:
    """Return a test set that the custodian named."""
    ledger.disclose(data_set, what=f"test set {data.name}", purpose=purpose)
    images = torch.from_numpy(data.images)
    return RealImages(images, torch.from_numpy(data.labels), f"test set {data.name}")
