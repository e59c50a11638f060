"""A small critic, and questions to it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.func import grad

from understudy.privacy.client import Critic, Round


def score(state, images, labels):
    """A hidden layer, so that slopes depend on what was learned."""
    hidden = torch.tanh(images.flatten(1) @ state["first"] + state["classes"][labels])
    return hidden @ state["last"]


def learn(state, images, labels, exist, public):
    """One step up the distance of real from generated scores."""

    def distance(state):
        real = (score(state, images, labels) * exist).sum() / exist.sum().clamp(min=1)
        return score(state, *public).mean() - real

    slopes = grad(distance)(state)
    return {name: value - 0.05 * slopes[name] for name, value in state.items()}


def ask(state, public):
    images, labels = public
    return grad(lambda images: score(state, images, labels).sum())(images)


def a_critic(pixels=64, classes=3, width=8, scale=1.0):
    draw = torch.Generator().manual_seed(0)
    shapes = {"first": (pixels, width), "classes": (classes, width), "last": (width,)}
    state = {name: 0.3 * torch.randn(s, generator=draw) for name, s in shapes.items()}
    return Critic(state=state, learn=learn, ask=lambda state, public: scale * ask(state, public))


CRITIC = a_critic(classes=10)
"""For processes that are told where to find one."""


def a_round(name="a-1", *, steps=1, batch=4, classes=3, side=8, seed=0, **changed):
    draw = torch.Generator().manual_seed(seed)
    made = Round(
        name=name,
        images=torch.rand(steps + 1, batch, 1, side, side, generator=draw),
        labels=torch.randint(classes, (steps + 1, batch), generator=draw),
    )
    return replace(made, **changed)
