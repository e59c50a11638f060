"""Audits of what was released alone: can it be told from the images who was in?

The weakest of attacks, and the only one that whoever receives a set can try. Its bounds lie far
below the claim even of faulty code; all that can be said is that it found no violation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from understudy.audit.bounds import Guesses, from_one_run
from understudy.audit.canaries import EACH_SIDE
from understudy.audit.finding import Finding
from understudy.errors import InvalidData, InvalidSettings
from understudy.evaluation.memorisation import nearest_distances
from understudy.measures import measured_run, require_private_part
from understudy.nets.convnet import ConvNet
from understudy.nets.params import per_channel
from understudy.nets.released import Artefact, Classifier
from understudy.pipeline import Data
from understudy.privacy.disclosure import RealImages
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.engine import Engine, choose_device
from understudy.training.sgd import SGD, fit

Scores = dict[str, NDArray[np.float64]]
NEAREST, LOSS = "nearest released image", "loss of a classifier"
WIDTH, EPOCHS, BATCH = 16, 100, 256
MOST_TRAINED_ON = 2000
"""Images that the classifier learns from."""
FEWEST, MOST = 50, 2000
"""Records that an attack is tried on."""
SAME = ("attack",)
"""Findings that agree in these are repetitions of one another."""


def audit_run(
    directory: str | Path,
    *,
    data: Data | None = None,
    test: Data | None = None,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Finding]:
    """Try to tell a run's training records from unseen ones, by what it released alone.

    Nothing is released and nothing charged: real records are read, which enters the ledger first,
    and what is found goes to the run's `private/metrics.json`. It has no guarantee.

    Args:
        directory: the run, with its private part.
        data: the records that the run was made from; by default read again from where they were.
        test: unseen records; by default the registered hold-out, or a built-in set's test split.
        ledger: where the readings are recorded; by default the run's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        seed: of which records are tried.
        progress: where to report.
    """
    require_private_part(directory)
    report = progress or Progress()
    engine = Engine(choose_device(device), say=report.say)
    with measured_run(directory, ledger, engine, report) as subject:
        certificate = subject.result.certificate
        if not certificate.has_guarantee:
            raise InvalidSettings(
                f"{directory} has no guarantee, so there is no claim to audit; audit another run"
            )
        unseen = subject.test_set(test)
        records = subject.training_records(data, otherwise="pass its records with --data")
        images, labels, is_in = mixed(records, unseen, seed)
        scored = scores_of(
            subject.result.released, images, labels, subject.facts, engine=engine, seed=seed
        )
        found = []
        for attack, scores in scored.items():
            guesses = Guesses.of(scores, is_in, max(1, round(EACH_SIDE * len(is_in))))
            one = Finding(
                subject=Path(directory).name,
                attack=attack,
                claimed=certificate.epsilon,
                delta=certificate.delta,
                bound=from_one_run(guesses, certificate.delta),
                how=f"{guesses.right} of {guesses.made} guesses right",
                repetitions=guesses.canaries,
            )
            subject.record("audit", one.to_json(), SAME)
            found.append(one)
    return found


def mixed(
    records: RealImages, unseen: RealImages, seed: int
) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
    """Toss a coin for each place: a training record, or an unseen one; return which it was.

    If both were drawn alike, who is a training record is then as good as a coin for each: what the
    bound for one run asks for.
    """
    most = min(MOST, len(records.labels), len(unseen.labels))  # whatever the coins say
    if most < FEWEST:
        raise InvalidData(
            f"there are {most} records of a kind to try, expected at least {FEWEST}; audit a "
            "larger set, or pass more unseen records with --test"
        )
    generator = public_generator(seed, "places")
    coins = torch.randint(0, 2, (most,), generator=generator).bool()
    images, labels, kept = [], [], []
    for side, given in ((True, records), (False, unseen)):
        wanted = int((coins == side).sum())
        some = torch.randperm(len(given.labels), generator=generator)[:wanted]
        images.append(given.images[some.to(given.images.device)].cpu())
        labels.append(given.labels[some.to(given.labels.device)].cpu())
        kept.append(np.full(wanted, side))
    order = torch.randperm(most, generator=generator)  # so that ties favour nobody
    return torch.cat(images)[order], torch.cat(labels)[order], np.concatenate(kept)[order.numpy()]


def scores_of(
    made: Artefact,
    images: Tensor,
    labels: Tensor,
    facts: PublicFacts,
    *,
    engine: Engine | None = None,
    seed: int = 0,
) -> Scores:
    """Score records by how much what was released looks as if they had been in; by attack.

    Args:
        made: what was released.
        images: of the records, bytes.
        labels: theirs.
        facts: public facts of the data set.
        engine: where to compute.
        seed: of the classifier that learns from a set.
    """
    runs_on = engine or Engine()
    if isinstance(made, Classifier):
        pixels = images.float() / 255
        chances = made.probabilities(pixels).gather(1, labels[:, None])[:, 0]
        return {LOSS: chances.clamp(min=1e-12).log().double().numpy()}
    near = nearest_distances(images, made.images, device=runs_on.device)
    found: Scores = {NEAREST: -near.numpy()}
    if made.is_labelled:
        found[LOSS] = -_losses(made, (images, labels), facts, engine=runs_on, seed=seed)
    return found


def _losses(
    made: SyntheticSet,
    records: tuple[Tensor, Tensor],
    facts: PublicFacts,
    *,
    engine: Engine,
    seed: int,
) -> NDArray[np.float64]:
    """Train a small classifier on the set, and return its loss on each record."""
    images, labels = records
    device = engine.device
    network = ConvNet(facts.shape, facts.classes, WIDTH).on(device)

    def normalised(pixels: Tensor) -> Tensor:
        there = pixels.to(device)
        return (there - per_channel(facts.mean, there)) / per_channel(facts.std, there)

    order = torch.randperm(len(made), generator=public_generator(seed, "audited"))
    some = order[:MOST_TRAINED_ON]
    params = fit(
        network,
        {n: w.to(device) for n, w in network.init(public_generator(seed, "auditor")).items()},
        normalised(made.images[some]),
        made.labels[some].to(device),
        sgd=SGD(lr=0.01, epochs=EPOCHS, batch=BATCH),
        generator=public_generator(seed, "order"),
        engine=engine,
    )
    with torch.no_grad():
        logits = torch.cat(
            [network(params, normalised(part.float() / 255)) for part in torch.split(images, 1024)]
        )
        losses = F.cross_entropy(logits, labels.to(device), reduction="none")
    return losses.double().cpu().numpy()
