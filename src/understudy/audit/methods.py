"""Audits of whole runs: a method on a public set with a thousand canaries, in one run.

The method runs as it always does, on a witness in the place of its curator. Each canary was put in
by a coin, and has a coordinate of its own in every release; over the run that gives the best test
there is for each, the sum of log-likelihood ratios. Guessing coins by it bounds the epsilon of the
run as a whole: plan, calibration, how often what was released, and how fresh the noise was.

Of methods whose releases show no canary, the released images are searched for them instead.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from understudy.audit.bounds import (
    Errors,
    Guesses,
    from_errors,
    from_errors_if_as_planned,
    from_errors_if_gaussian,
    from_one_run,
    from_one_run_if_gaussian,
)
from understudy.audit.canaries import Canaries
from understudy.audit.finding import Finding
from understudy.audit.onlooker import Onlooker
from understudy.audit.released import Scores, scores_of
from understudy.audit.stage import DELTA, MakeRandomness, Stage, secret_draws
from understudy.audit.witness import ADDED, Observation
from understudy.data.images import LabelledImages
from understudy.data.sources import read_source
from understudy.methods import load_method
from understudy.methods.method import Method, configure
from understudy.nets.params import Params
from understudy.nets.released import Artefact
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Accountant, Budget, Plan, PlannedRelease
from understudy.progress import Progress
from understudy.training.engine import Engine

CPU = torch.device("cpu")
EPSILON = 10.0
CANARIES, MEMBERS, IN_TURN = 1000, 200, 10
"""Canaries of a run; where an ensemble learns, its members, with one canary each at most; where
whole batches answer, canaries that these turn round for one after another."""
SMALL: dict[str, Any] = {
    "images_per_class": 5, "steps": 40, "batch": 600, "hidden": 16, "width": 8,
    "rounds": 20, "outer": 2, "batches": 1, "inner": 2, "features": 400, "looks": 2,
    "encoder": "random", "layers": ":2", "sum_order": 20, "product_order": 4, "pairs": 4,
    "teachers": MEMBERS, "teacher_batch": 3, "top": 5, "projections": 2,
    "bins": 4, "student_steps": 2, "generator_steps": 2, "critics": MEMBERS, "asked": 50.0,
    "critic_width": 2, "warm_up": 2, "generated": 10, "copies": 2, "levels": 2,
    "blocks": 1, "sample_steps": 4, "waves": 45, "samples": 200, "networks": 4, "refine_steps": 5,
    "refine_batch": 40, "match_steps": 5, "taught": 20,
}  # fmt: skip
"""Settings of a run that takes seconds; each method has some of them."""
TAUGHT: dict[str, Any] = {"steps": 5, "batch": 4, "width": 2, "hidden": 8, "first_steps": 1}
"""The same for methods with an ensemble, all of whose members learn in every step."""
CRAFTED = "crafted canaries, all releases"
GRADIENTS = "random images, noisy gradients"
EXACT_RELEASES = 20
"""Releases without noise, to count who was sampled."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """On what, and how, a method is audited."""

    data: str | LabelledImages = "digits"
    """A known public set."""
    epsilon: float = EPSILON
    """What the run is to claim."""
    accountant: Accountant = "pld"
    canaries: int | None = None
    """How many, about half of them in; by default as many as make sense."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the method."""
    is_small: bool = True
    """Whether other settings are those of a run that takes seconds, or the method's usual ones."""
    seed: int = 0
    """Of who is in, and of the method's public randomness."""
    device: torch.device = CPU
    randomness: MakeRandomness = secret_draws
    """For tests: makes draws of their own."""

    @property
    def budget(self) -> Budget:
        """The guarantee that the run is to claim."""
        return Budget(epsilon=self.epsilon, delta=DELTA, accountant=self.accountant)

    def prepared(self, name: str) -> tuple[Stage, Method]:
        """Plant the canaries, and configure the method for the set with them."""
        base = self.data if isinstance(self.data, LabelledImages) else read_source(self.data)
        method_class = load_method(name)
        known = {field.name for field in dataclasses.fields(method_class.config_class)}
        small = SMALL | (TAUGHT if known & {"teachers", "critics"} else {})
        given = {key: value for key, value in small.items() if key in known and self.is_small}
        given |= self.settings
        members = int(given.get("teachers") or given.get("critics") or 0)
        usual = members or (IN_TURN if "generated" in known else CANARIES)
        coins = Canaries.toss(self.canaries or usual, self.seed)
        stage = Stage(base, coins, members, Engine(self.device), self.randomness)
        configured = configure(method_class, stage.facts, self.epsilon, settings=given)
        return stage, method_class(configured.config, stage.facts, seed=self.seed)


def audit_method(
    name: str, setup: Setup | None = None, *, progress: Progress | None = None
) -> Finding:
    """Run a method with canaries, and bound the epsilon of the run."""
    started, delta, chosen = time.perf_counter(), DELTA, setup or Setup()
    stage, method = chosen.prepared(name)
    coins, plan = stage.canaries, method.plan()
    knows_others = any(line.kind == "class_sums" for line in plan)
    with stage.opened(plan, chosen.budget, knows_others=knows_others) as witness:
        made = method.run(cast(Curator, witness), progress or Progress())
        calibration, roomy = witness.calibration, witness.plan
    attack, scores = CRAFTED, witness.evidence() if witness.seen else None
    if scores is None:
        attack, scores = next(iter(_image_scores(made, stage).items()))
    bound, further = bounds_of(scores, coins, roomy, calibration.noise_multiplier, delta)
    return Finding(
        subject=name,
        attack=attack,
        claimed=calibration.epsilon,
        delta=delta,
        bound=bound,
        how="guesses of one run",
        repetitions=coins.count,
        further=further if witness.seen else {},
        tests=tests_of(stage, plan, witness.seen) if witness.seen else {},
        seconds=round(time.perf_counter() - started, 1),
    )


def audit_images(
    name: str, setup: Setup | None = None, *, progress: Progress | None = None
) -> list[Finding]:
    """Run a method on canaries that are treated like any record; a finding for each attack.

    One attack looks at the noisy gradients, if there are any, the others at what was released
    alone.
    """
    started, chosen = time.perf_counter(), setup or Setup()
    stage, method = chosen.prepared(name)
    coins = stage.canaries
    with stage.opened(method.plan(), chosen.budget) as witness:
        onlooker = Onlooker(witness.curator, *_canary_records(stage))
        made = method.run(cast(Curator, onlooker), progress or Progress())
    found = {GRADIENTS: onlooker.scores()} if onlooker.has_looked else {}
    return [
        Finding(
            subject=name,
            attack=attack,
            claimed=witness.calibration.epsilon,
            delta=DELTA,
            bound=from_one_run(Guesses.of(scores, coins.is_in, coins.each_side), DELTA),
            how="guesses of one run",
            repetitions=coins.count,
            seconds=round(time.perf_counter() - started, 1),
        )
        for attack, scores in (found | _image_scores(made, stage)).items()
    ]


def _canary_records(stage: Stage) -> tuple[Tensor, Tensor]:
    coins = stage.canaries
    return (
        torch.from_numpy(coins.images(stage.facts.shape)),
        torch.from_numpy(coins.labels(stage.facts.classes)),
    )


def _image_scores(made: Artefact, stage: Stage) -> Scores:
    """Score canaries by what was released alone."""
    found = scores_of(made, *_canary_records(stage), stage.facts, engine=stage.engine)
    return {f"random images, {attack}": scores for attack, scores in found.items()}


def bounds_of(
    scores: NDArray[np.float64], coins: Canaries, plan: Plan, noise: float, delta: float
) -> tuple[float, dict[str, float]]:
    """Return what the guesses of one run show, and what canaries show as so many repetitions.

    The former holds whatever the run did. For the latter a canary must be independent of all
    others: each has coordinates, noise and sampling of its own, so it is.
    """
    guesses = Guesses.of(scores, coins.is_in, coins.each_side)
    errors = Errors.of(scores > 0, coins.is_in)
    further = {"errors, whatever the mechanism": from_errors(errors, delta)}
    if all(line.sampling_rate == 1 for line in plan):
        further["guesses, if Gaussian"] = from_one_run_if_gaussian(guesses, delta)
        further["errors, if Gaussian"] = from_errors_if_gaussian(errors, delta)
    else:
        further["errors, by the trade-off curve"] = from_errors_if_as_planned(
            errors, plan, noise, delta
        )
    return from_one_run(guesses, delta), further


def tests_of(stage: Stage, plan: Plan, seen: Sequence[Observation]) -> dict[str, float]:
    """Test the noise of a run, and of releases of gradients the sampling and the bound."""
    found = noise_tests(seen, ~stage.canaries.is_in)
    for line in plan:
        if line.kind == "gradient":
            found |= sampling_tests(stage, line)
    return found


def noise_tests(seen: Sequence[Observation], is_out: NDArray[np.bool_]) -> dict[str, float]:
    """Test that canaries which are out show noise of the right size, new in each release."""
    rows = [
        (one.values[is_out] - one.means[0]) / one.noise
        for one in seen
        if one.means == ADDED or one.rate == 1  # otherwise what is left is no normal
    ]
    if not rows:
        return {}
    noise = np.stack(rows)
    total, low = float(np.square(noise).sum()), stats.chi2(noise.size).cdf
    found = {"noise has its size": float(2 * min(low(total), 1 - low(total)))}
    if len(rows) > 1:
        together = float((noise[1:] * noise[:-1]).sum()) / math.sqrt(noise[1:].size)
        found["noise is new each time"] = float(2 * stats.norm.sf(abs(together)))
    return found


def sampling_tests(stage: Stage, line: PlannedRelease) -> dict[str, float]:
    """Ask for some releases without noise: who was sampled, and how much it contributed."""
    few = dataclasses.replace(line, count=EXACT_RELEASES)
    values = []
    with stage.opened(Plan((few,)), Budget(epsilon=math.inf, delta=DELTA)) as witness:
        weight = torch.zeros(1, device=stage.engine.device)
        for _ in range(EXACT_RELEASES):
            witness.gradient(no_loss, {"weight": weight}, clip_norm=1.0, release=line.name)
        values = [one.values for one in witness.seen]
    is_in = stage.canaries.is_in
    asked = np.stack(values)
    sampled, total = int((asked[:, is_in] > 0.5).sum()), asked[:, is_in].size
    is_bounded = asked.max() <= 1 + 1e-6 and np.abs(asked[:, ~is_in]).max() == 0
    return {
        "units are sampled at the rate": float(
            stats.binomtest(sampled, total, line.sampling_rate).pvalue
        ),
        "contributions keep the bound": float(is_bounded),
    }


def no_loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
    """Return a loss that no record changes."""
    return (params["weight"] * 0).sum()
