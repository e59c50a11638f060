"""What tests of a federation share: clients on parts of the digits, and something to train."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # processes of their own have no conftest

import numpy as np
import torch

from critics import CRITIC
from understudy.data.images import labelled_images
from understudy.federated.app import Lines
from understudy.pipeline import load_data
from understudy.privacy.client import Offer
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget
from understudy.privacy.registration import RegistrationTerms, register
from understudy.privacy.vault import Vault

BATCH = 20
BUDGET = Budget(epsilon=10.0, delta=1e-5)


def digits(number: int, clients: int):
    """The part of the digits that a client holds."""
    data = load_data("digits")
    mine = slice(number, None, clients)
    return labelled_images(data.images[mine], data.labels[mine], classes=10)


def a_client(folder: Path, number: int, *, clients=20, rounds=300, budget=BUDGET, clip_norm=1.0):
    folder.mkdir(parents=True, exist_ok=True)
    ledger, data = Ledger(folder / f"{number}.sqlite"), digits(number, clients)
    vault = Vault(data, register(ledger, data, RegistrationTerms()), ledger)
    offer = Offer(rounds=rounds, batch=BATCH, most_steps=2, clip_norm=clip_norm)
    return vault.open_rounds(offer, CRITIC, budget, ledger, run_id="trial")


def train(critics, out, *, rounds=300, rate=0.5):
    """The simplest generator: one image of each class, moved up the slope."""
    images = torch.full((10, 1, 8, 8), 0.5)
    labels = torch.arange(10).repeat(BATCH // 10)
    for done in Lines().steps(range(rounds)):
        shown = images[labels]
        critics.advance(shown, labels)
        slope = critics.gradient(shown, labels)
        images = (images + rate * slope.view(-1, 10, 1, 8, 8).sum(0)).clamp(0, 1)
        if done % 10 == 0:
            print(f"round {done}", flush=True)
    np.save(out / "images.npy", images.numpy())
    return images


def short(critics, out):
    """For `flwr run`: enough rounds for something to happen in between."""
    train(critics, out, rounds=20)
