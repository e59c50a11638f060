"""GS-WGAN with critics that stay with their owners: the same method, other critics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from understudy.errors import InvalidSettings
from understudy.federated.app import Lines
from understudy.federated.release import facts_of, release
from understudy.federated.server import FederatedCritics
from understudy.methods.gs_wgan import GSWGAN, CriticState, GSWGANConfig, Learning
from understudy.nets.wgan import Critic as Network
from understudy.privacy.client import Critic
from understudy.privacy.plan import PublicFacts
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet

EVERYONES_SEED = 0
"""All critics start alike, as far as images are: nothing of it is secret."""
DEFAULTS = GSWGANConfig()


def critic(facts: PublicFacts, config: GSWGANConfig = DEFAULTS) -> Critic:
    """Return the critic of a client whose images have these public facts."""
    network = Network(
        facts.shape, facts.classes, width=config.critic_width, depth=config.critic_depth
    )
    learning = Learning(network)
    lr = torch.tensor(config.critic_lr)

    def learn(
        state: CriticState, images: Tensor, labels: Tensor, exist: Tensor, public: Any
    ) -> CriticState:
        return learning(state, images, labels, exist, (*public, lr.to(images.device)))

    def ask(state: CriticState, public: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = public
        slope: Tensor = grad(learning.scaled_score, argnums=1)(state, images, labels)
        return slope

    start = learning.start(network.init(public_generator(EVERYONES_SEED, "critic")))
    return Critic(state=start, learn=learn, ask=ask)


def critic_of(named: Critic | Callable[[PublicFacts], Critic], facts: PublicFacts) -> Critic:
    """Return the critic, made for these facts where it has to be."""
    return named if isinstance(named, Critic) else named(facts)


def train(
    critics: FederatedCritics,
    out: Path,
    *,
    shape: Sequence[int],
    classes: Sequence[str],
    **settings: Any,
) -> SyntheticSet:
    """Train a generator with the critics of clients; leave it, and a set, in OUT/release.

    Args:
        critics: those of the clients.
        out: folder of the federation.
        shape: of an image: channels, height, width.
        classes: names of the classes, in the order of the labels.
        **settings: of GS-WGAN.
    """
    if len(shape) != 3:
        raise InvalidSettings(f"shape is {list(shape)}, expected [channels, height, width]")
    try:
        config = GSWGANConfig(**settings)
    except TypeError as error:
        raise InvalidSettings(
            f"{error}; see `understudy methods gs-wgan` for the settings"
        ) from error
    facts = facts_of(critics.clients, shape, classes)
    method = GSWGAN(config, facts, seed=EVERYONES_SEED)
    state = method.start(torch.device("cpu"))
    method.warm_up(critics, state)
    for step in Lines().steps(range(config.steps)):
        state = method.turn(critics, state, step)
    made = method.drawn(state)
    release(
        made, critics.course(), out,
        facts=facts, name="gs-wgan", settings=asdict(config), seed=EVERYONES_SEED,
    )  # fmt: skip
    return made
