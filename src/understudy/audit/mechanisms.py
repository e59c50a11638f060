"""Audits of the releases, one by one: thousands of repetitions with a worst-case unit and without.

One release is asked of a data set that is all canaries, through a real curator, with the noise that
one such release is calibrated to. Each canary moves a coordinate of its own by as much as the bound
allows (of a member of an ensemble, from one end to the other), and only that. So every coordinate
is a repetition of the experiment with one worst-case unit: the noise of coordinates is drawn
independently, units are sampled and bounded independently, and the sum of what other canaries
contribute to this coordinate is exactly zero. A fault that ties coordinates together, such as noise
that repeats, would show in the tests of the noise of `audit.methods` and `tests/statistical`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from understudy.audit.bounds import (
    Errors,
    from_errors,
    from_errors_if_as_planned,
    from_errors_if_gaussian,
)
from understudy.audit.canaries import Canaries
from understudy.audit.finding import Finding
from understudy.audit.stage import DELTA, MakeRandomness, Stage, secret_draws
from understudy.audit.witness import Observation, Witness
from understudy.data.images import LabelledImages, labelled_images
from understudy.errors import InvalidSettings
from understudy.nets.params import Params
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.calibration import calibrate
from understudy.privacy.plan import Block, Budget, Kind, Plan, PlannedRelease
from understudy.privacy.releases.class_sums import Embedding

EPSILON, EPSILON_IF_SAMPLED = 10.0, 4.0
REPETITIONS = 10_000
"""Of each side."""
AT_ONCE, AT_ONCE_IF_SAMPLED = 1000, 5000
"""Canaries of one release; calibrating one that samples takes seconds, so they are fewer."""
FEW, TURNS = 10, 100
"""Where all records share one bound: canaries, and how often each of them has its turn."""
CLASSES = 1000
"""As many as there may be: a histogram needs one for each canary."""
SAMPLED = 0.2
SIDE = 4


@dataclass(frozen=True)
class Probe:
    """One kind of release, asked as its methods ask for it."""

    kind: Kind
    ask: Callable[[Witness, int], object]
    """Gets the number of canaries as well."""
    rate: float = 1.0
    has_members: bool = False
    one_each: bool = False
    """Whether a member's shard is one unit."""
    takes_turns: bool = False
    """Whether a release shows one canary alone."""

    @property
    def at_once(self) -> int:
        """Canaries of one run."""
        if self.takes_turns:
            return FEW
        return AT_ONCE if self.rate == 1 else AT_ONCE_IF_SAMPLED

    @property
    def releases(self) -> int:
        """How often it is asked for in one run."""
        return FEW * TURNS if self.takes_turns else 1

    @property
    def epsilon(self) -> float:
        """What one release is calibrated to."""
        return EPSILON if self.rate == 1 else EPSILON_IF_SAMPLED

    def budget(self) -> Budget:
        """Return the budget of a run whose releases have the noise of one that is made alone."""
        alone = Budget(epsilon=self.epsilon, delta=DELTA)
        if self.releases == 1:
            return alone
        noise = calibrate(self.plan(1), alone).noise_multiplier
        return replace(alone, epsilon=epsilon_of(self.plan(self.releases), noise, DELTA, "pld"))

    def plan(self, count: int) -> Plan:
        """Plan so many releases."""
        blocks = _blocks(self.at_once) if self.kind == "class_sums" else ()
        sizes = (block.sums(CLASSES) * block.dimension for block in blocks)
        line = PlannedRelease(
            name=self.kind,
            kind=self.kind,
            count=count,
            dimension=sum(sizes) or CLASSES,
            sampling_rate=self.rate,
            blocks=blocks,
        )
        return Plan((line,))


def _ask_gradient(witness: Witness, _: int) -> object:
    def nothing(params: Params, image: Tensor, label: Tensor) -> Tensor:
        return (params["weight"] * 0).sum()

    return witness.gradient(nothing, {"weight": torch.zeros(1)}, clip_norm=0.1)


def _ask_batch_gradient(witness: Witness, count: int) -> object:
    def nothing(params: Params, images: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        return (params["weight"] * 0).sum()

    for _ in range(count * TURNS):
        witness.batch_gradient(nothing, {"weight": torch.zeros(1)}, bound=0.1)
    return None


def _blocks(count: int) -> tuple[Block, ...]:
    """Return a block by class and one over all, with a place for each canary in both."""
    return (
        Block(name="by class", dimension=-(-count // CLASSES), bound=3.0),
        Block(name="over all", dimension=count, ratio=2.0, by_class=False, is_non_negative=True),
    )


def _ask_class_sums(witness: Witness, count: int) -> object:
    blocks = _blocks(count)

    def nothing(image: Tensor) -> list[Tensor]:
        return [image.new_zeros(block.dimension) for block in blocks]

    return witness.class_sums(Embedding(nothing, blocks))


def _ask_histogram(witness: Witness, _: int) -> object:
    return witness.histogram()


def _ask_votes(
    witness: Witness, count: int, *, is_non_negative: bool = False, one_more: bool = False
) -> object:
    count += one_more
    members = witness.ensemble(torch.zeros(count), members=count)
    return witness.votes(
        members, lambda state, public: state[None], dimension=1, bound=0.5,
        is_non_negative=is_non_negative,
    )  # fmt: skip


def _ask_sample_gradient(witness: Witness, count: int) -> object:
    members = witness.ensemble(torch.zeros(count), members=count)
    return witness.sample_gradient(
        members, lambda state, images, labels: state * images.sum(),
        torch.zeros(1, 1, SIDE, SIDE), torch.zeros(1, dtype=torch.int64), bound=0.5,
    )  # fmt: skip


PROBES = {
    "gradient": Probe("gradient", _ask_gradient),
    "gradient, sampled": Probe("gradient", _ask_gradient, SAMPLED),
    "batch_gradient": Probe("batch_gradient", _ask_batch_gradient, takes_turns=True),
    "class_sums": Probe("class_sums", _ask_class_sums),
    "class_sums, sampled": Probe("class_sums", _ask_class_sums, SAMPLED),
    "histogram": Probe("histogram", _ask_histogram),
    "votes": Probe("votes", _ask_votes, has_members=True),
    "votes, non-negative": Probe(
        "votes", partial(_ask_votes, is_non_negative=True), has_members=True
    ),
    "votes, one unit each": Probe(
        "votes", partial(_ask_votes, one_more=True), has_members=True, one_each=True
    ),
    "sample_gradient": Probe("sample_gradient", _ask_sample_gradient, has_members=True),
    "sample_gradient, sampled": Probe(
        "sample_gradient", _ask_sample_gradient, SAMPLED, has_members=True
    ),
}


def audit_release(
    name: str,
    *,
    repetitions: int = REPETITIONS,
    seed: int = 0,
    randomness: MakeRandomness = secret_draws,
) -> Finding:
    """Ask for a release until there are about `repetitions` of each side, and bound its epsilon.

    Args:
        name: one of `PROBES`.
        repetitions: with a worst-case unit, and as many without.
        seed: of who is in.
        randomness: for tests: makes draws of their own.
    """
    if name not in PROBES:
        raise InvalidSettings(f"there is no release '{name}', expected {', '.join(PROBES)}")
    started, probe, delta = time.perf_counter(), PROBES[name], DELTA
    budget, plan, count = probe.budget(), probe.plan(probe.releases), probe.at_once
    members = count + probe.one_each if probe.has_members else 0
    bystanders = _bystanders(0 if probe.one_each else members)
    has_unit, alarms = [], []
    for turn in range(-(-2 * repetitions // (count * (TURNS if probe.takes_turns else 1)))):
        canaries = Canaries.toss(count, seed=seed + turn)
        stage = Stage(bystanders, canaries, members, randomness=randomness)
        with stage.opened(plan, budget) as witness:
            probe.ask(witness, count)
            noise, observed = witness.calibration.noise_multiplier, witness.seen
        for seen in observed:
            has_unit.append(canaries.is_in)
            alarms.append(seen.values > _threshold(seen))
    errors = Errors.of(np.concatenate(alarms), np.concatenate(has_unit))
    if probe.rate == 1:
        bound, how = from_errors_if_gaussian(errors, delta), "errors, if Gaussian"
    else:
        bound = from_errors_if_as_planned(errors, plan, noise, delta)
        how = "errors, by the trade-off curve"
    return Finding(
        subject=name,
        attack="worst-case unit, or not",
        claimed=epsilon_of(probe.plan(1), noise, delta, "pld"),
        delta=delta,
        bound=bound,
        how=how,
        repetitions=errors.with_unit + errors.without_unit,
        further={"errors, whatever the mechanism": from_errors(errors, delta)},
        seconds=round(time.perf_counter() - started, 1),
    )


def _threshold(seen: Observation) -> float:
    """Return the value above which the unit is said to be there, fixed ahead.

    Half-way between the means; where a unit is sampled only now and then, at the mean of those that
    are: a false alarm is rarer there, and says more.
    """
    without, with_it = seen.means
    return (without + with_it) / 2 if seen.rate == 1 else with_it


def _bystanders(members: int) -> LabelledImages:
    """Return black images that are always there: one, or one for each member and one more."""
    count = members + 1
    return labelled_images(
        np.zeros((count, SIDE, SIDE), dtype=np.uint8), np.zeros(count, dtype=np.int64),
        classes=CLASSES, is_public_benchmark=True, name="nobody",
    )  # fmt: skip
