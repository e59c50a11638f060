"""`understudy plan`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.cli.settings import given, settings_class
from understudy.data.images import MAX_CLASSES
from understudy.data.reading import MAX_SIDE, MIN_SIDE
from understudy.errors import InvalidSettings
from understudy.files import home
from understudy.job import Request
from understudy.job import planned as plan_of
from understudy.methods.choosing import AUTO
from understudy.privacy.calibration import Calibration, calibrate
from understudy.privacy.plan import Accountant, Budget, Plan, PublicFacts
from understudy.privacy.randomness import tail_delta
from understudy.privacy.secure import secret_randomness
from understudy.progress import Progress
from understudy.training.engine import choose_device

DEFAULT_METHOD = AUTO
MOST_RECORDS = 10**12
NAMES: dict[Accountant, str] = {"pld": "PLD", "renyi": "Rényi"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Public facts and budget."""

    records: int
    """Number of units (N0)."""
    method: str = DEFAULT_METHOD
    """Method of generation; auto chooses one and says why."""
    epsilon: float = 10.0
    """Privacy budget."""
    delta: float = 1e-5
    """Probability outside the guarantee."""
    steps: int | None = None
    """Number of releases, if not the method's own."""
    classes: int = 10
    """Number of classes."""
    shape: tuple[int, int, int] = (1, 28, 28)
    """Channels, height and width."""
    preset: str = "auto"
    """Named settings of the method."""
    secure_noise: bool = False
    """Show what drawing noise from a cipher would take here."""
    allow_large_delta: bool = False
    """Accept delta >= 1/N0."""
    config: Path | None = None
    """TOML file with any of these options; flags on the command line win."""


def build(method: str) -> Callable[..., None]:
    """Return the command with the settings of `method` as flags."""
    settings_type = settings_class(method)

    def plan(
        *,
        options: Annotated[PlanOptions, Parameter(name="*")],
        output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
        settings: Any = None,
    ) -> None:
        """Show noise, releases and cost of a run before spending anything."""
        budget = Budget(epsilon=options.epsilon, delta=options.delta)
        out = make_output(output)
        facts, planned = _plan(options, given(settings), out)
        out.table(
            "Releases",
            ("release", "kind", "count", "sampling rate", "coordinates"),
            [
                (r.name, r.kind, f"{r.count}", f"{r.sampling_rate:.6g}", f"{r.dimension}")
                for r in planned
            ],
        )
        found = {accountant: _calibrated(planned, budget, accountant) for accountant in NAMES}
        rows = [_row(planned, accountant, noise) for accountant, noise in found.items()]
        columns = ("accountant", "noise multiplier", "epsilon", "delta accounted",
                   "delta for the sampler's tail", "bound on that tail")  # fmt: skip
        out.table(f"Noise for epsilon {options.epsilon:g}, delta {options.delta:g}", columns, rows)
        if signals := _signals(planned, facts, found["pld"].noise_multiplier):
            names = ("block", "features", "bound", "noise ratio", "signal to noise, at most")
            out.table("Sums of records against their noise (PLD)", names, signals)
        if options.secure_noise:
            title = "Drawing the noise of one release, here"
            out.table(title, ("generator", "coordinates", "milliseconds"), _drawing(planned))

    plan.__annotations__["settings"] = Annotated[settings_type | None, Parameter(name="*")]
    return plan


def _check_facts(options: PlanOptions) -> None:
    """Refuse facts that no data set has."""
    channels, *sides = options.shape
    for what, found, least, most in (
        ("records", options.records, 1, MOST_RECORDS),
        ("classes", options.classes, 2, MAX_CLASSES),
        ("shape: each side", min(sides), MIN_SIDE, MAX_SIDE),
        ("shape: each side", max(sides), MIN_SIDE, MAX_SIDE),
    ):
        if not least <= found <= most:
            raise InvalidSettings(f"{what} is {found}, expected {least} to {most}")
    if channels not in (1, 3):
        raise InvalidSettings(f"shape begins with {channels} channels, expected 1 or 3")


def _plan(
    options: PlanOptions, settings: dict[str, Any], progress: Progress
) -> tuple[PublicFacts, Plan]:
    _check_facts(options)
    channels = options.shape[0]
    facts = PublicFacts(
        units=options.records,
        class_names=tuple(str(n) for n in range(options.classes)),
        shape=options.shape,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )
    asked = Request(
        method=options.method,
        epsilon=options.epsilon,
        delta=options.delta,
        preset=options.preset,
        settings=settings,
        allow_large_delta=options.allow_large_delta,
    )
    _, _, planned = plan_of(asked.settled(facts, progress), facts)
    if options.steps is None:
        return facts, planned
    if len(planned.releases) != 1:
        raise InvalidSettings("--steps needs a method with one kind of release; leave it out")
    return facts, Plan((dataclasses.replace(planned.releases[0], count=options.steps),))


def _calibrated(planned: Plan, budget: Budget, accountant: Accountant) -> Calibration:
    return calibrate(
        planned,
        dataclasses.replace(budget, accountant=accountant),
        cache=home() / "calibrations",
    )


def _signals(planned: Plan, facts: PublicFacts, multiplier: float) -> list[tuple[str, ...]]:
    """Describe each block of sums."""
    return [
        (
            block.name,
            f"{block.dimension}" + (f" x {facts.classes} classes" if block.by_class else ""),
            f"{block.bound:.4g}",
            f"{block.ratio:g}",
            f"{block.signal_to_noise(line, facts, line.noise_ratio * multiplier):.3g}",
        )
        for line in planned
        for block in line.blocks
    ]


def _drawing(planned: Plan) -> list[tuple[str, ...]]:
    """Time each generator on the largest release."""
    device, count = choose_device("auto"), max(line.dimension for line in planned)
    rows: list[tuple[str, ...]] = []
    for source in (secret_randomness(device, secure=secure) for secure in (False, True)):
        _ = source.normal(count)[0].item()  # the first draw takes longer
        started = time.perf_counter()
        _ = source.normal(count)[0].item()
        taken = 1e3 * (time.perf_counter() - started)
        rows.append((source.generator, f"{count}", f"{taken:.3g}"))
    return rows


def _row(planned: Plan, accountant: Accountant, found: Calibration) -> tuple[str, ...]:
    tail = tail_delta(planned, found.noise_multiplier) if found.noise_multiplier else 0.0
    return (
        NAMES[accountant],
        f"{found.noise_multiplier:.4f}",
        f"{found.epsilon:.4f}",
        f"{found.delta_accounted:.4g}",
        f"{found.delta_tail:.3g}",
        f"{tail:.3g}",
    )
