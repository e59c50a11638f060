"""GS-WGAN over clients: the same method file, with critics that are elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from federation import BATCH, BUDGET, digits

import understudy
from understudy.errors import InvalidSettings
from understudy.federated.gs_wgan import critic, train
from understudy.federated.server import FederatedCritics
from understudy.federated.simulation import LocalGrid
from understudy.methods.gs_wgan import GSWGANConfig
from understudy.privacy.client import Offer
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget
from understudy.privacy.registration import RegistrationTerms, register
from understudy.privacy.vault import Vault

CLIENTS, ROUNDS = 3, 4
SMALL = GSWGANConfig(critic_width=4, critic_depth=1)


def a_client(folder, number, budget=BUDGET):
    ledger, data = Ledger(folder / f"{number}.sqlite"), digits(number, CLIENTS)
    vault = Vault(data, register(ledger, data, RegistrationTerms()), ledger)
    offer = Offer(rounds=ROUNDS, batch=BATCH, most_steps=2)
    return vault.open_rounds(offer, critic(vault.facts, SMALL), budget, ledger, run_id="trial")


def trained(folder, budget=BUDGET, **settings):
    clients = [a_client(folder, number, budget) for number in range(CLIENTS)]
    critics = FederatedCritics(
        LocalGrid(dict(enumerate(clients, 1))), clients=CLIENTS, most_steps=2
    )
    settings = {"steps": ROUNDS, "batch": BATCH, "width": 4, "images_per_class": 3} | settings
    made = train(
        critics, folder, shape=[1, 8, 8], classes=list("0123456789"), warm_up=5, **settings
    )
    return clients, critics, made


def test_leaves_a_set_and_its_generator_and_charges_every_client(tmp_path):
    clients, critics, made = trained(tmp_path)
    assert made.images.shape == (30, 1, 8, 8)
    assert [client.rounds_answered for client in clients] == [ROUNDS] * CLIENTS
    assert critics.statement()["rounds"] == ROUNDS
    again = understudy.load(tmp_path)
    assert torch.allclose(again.images, made.images, atol=1 / 255)
    assert len(understudy.sample(tmp_path, count=20)) == 20


def test_what_it_leaves_is_certified_at_what_every_client_paid(tmp_path):
    clients, critics, _ = trained(tmp_path)
    found = understudy.verify(tmp_path)
    paid = max(client.statement()["server_view"]["epsilon"] for client in clients)
    assert found.recomputed_epsilon == pytest.approx(paid, abs=1e-6)
    assert found.certificate.content["federation"] == json.loads(
        json.dumps(critics.course().to_json())
    )
    settings = found.certificate.content["method"]["settings"]
    assert (settings["steps"], settings["critic_width"]) == (ROUNDS, GSWGANConfig().critic_width)


def test_without_noise_it_leaves_no_guarantee(tmp_path):
    trained(tmp_path, Budget(epsilon=float("inf"), delta=1e-5))
    assert not understudy.verify(tmp_path).certificate.has_guarantee


def test_the_advice_of_critics_moves_the_generator(tmp_path):
    """Without noise: critics that warmed up give a slope, and images follow it."""
    (tmp_path / "a").mkdir()
    _, _, made = trained(tmp_path / "a", Budget(epsilon=float("inf"), delta=1e-5), lr=0.01)
    (tmp_path / "b").mkdir()
    _, _, other = trained(tmp_path / "b", Budget(epsilon=float("inf"), delta=1e-5), lr=1e-9)
    assert (made.images - other.images).abs().mean() > 0.01


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"shape": [8, 8], "classes": ["a"]}, r"shape is \[8, 8\]"),
        ({"shape": [1, 8, 8], "classes": ["a"], "speed": 3}, "understudy methods gs-wgan"),
    ],
)
def test_senseless_settings_are_refused(tmp_path, given, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        train(None, tmp_path, **given)
