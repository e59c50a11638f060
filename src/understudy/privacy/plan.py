"""What is public about a data set, what a method wants released, and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from understudy.data.reading import RECORD
from understudy.errors import InvalidSettings, PlanViolation

Kind = Literal["gradient", "class_sums", "histogram", "votes", "sample_gradient", "batch_gradient"]
OF_ENSEMBLES: frozenset[Kind] = frozenset({"votes", "sample_gradient"})
"""Kinds whose answers come from what members learned, which no run survives."""
IN_ONE_PROCESS: frozenset[Kind] = OF_ENSEMBLES | {"batch_gradient"}
"""Kinds whose answers need all units in one place; others are sums, and come in parts."""
REPLACING: frozenset[Kind] = frozenset({"sample_gradient"})
"""Kinds that sample members: emptying a unit's slot turns a sampled answer into another."""
Accountant = Literal["pld", "renyi"]
RELATION = "zero-out"


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """Everything about a private data set that is declared public when it is registered.

    Sampling rates, denominators and shard sizes use `units` (N0), never the length of anything.
    """

    units: int
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unit: str = "record"
    max_per_unit: int | None = None
    among: tuple[str, ...] = ()
    """All classes of the task, if these records are of some of them and others have the rest."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def one_each(self) -> bool:
        """Whether a unit has one record; otherwise it may have several."""
        return self.unit == RECORD or self.max_per_unit == 1

    @property
    def all_classes(self) -> tuple[str, ...]:
        """Names of the classes that a classifier will tell apart, other parties' included."""
        return self.among or self.class_names

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> PublicFacts:
        """Read what `to_json` returned."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in content.items()
        }
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One part of an embedding of records, as the plan declares it and the release enforces it."""

    name: str
    dimension: int
    """Number of a record's features."""
    bound: float = 1.0
    """L2 norm that a record's features do not exceed."""
    ratio: float = 1.0
    """Noise, measured in bounds, relative to other blocks'."""
    by_class: bool = True
    """Whether each class's records are summed apart."""
    is_non_negative: bool = False

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise InvalidSettings(
                f"block '{self.name}' has {self.dimension} features, expected at least 1"
            )
        for what in ("bound", "ratio"):
            value = getattr(self, what)
            if not (value > 0 and math.isfinite(value)):
                raise InvalidSettings(
                    f"block '{self.name}' has a {what} of {value:g}, expected a positive number"
                )

    def sums(self, classes: int) -> int:
        """Return the number of sums over records that are released."""
        return classes if self.by_class else 1

    def signal_to_noise(self, line: PlannedRelease, facts: PublicFacts, multiplier: float) -> float:
        """Return the most that a sum can be longer than its noise, if classes are equally large.

        Args:
            line: what this is a block of.
            facts: public facts of the data set.
            multiplier: the noise multiplier of the line.
        """
        records = line.sampling_rate * facts.units / self.sums(facts.classes)
        noise = multiplier * joint_bound(line.blocks) * self.ratio * math.sqrt(self.dimension)
        return records / noise if noise else math.inf


def joint_bound(blocks: Sequence[Block]) -> float:
    """Return the L2 norm that a record's blocks do not exceed, each divided by bound and ratio."""
    return math.sqrt(sum(block.ratio**-2 for block in blocks))


@dataclass(frozen=True, kw_only=True)
class PlannedRelease:
    """One line of a plan: `count` Gaussian releases at one sampling rate."""

    name: str
    kind: Kind
    count: int
    dimension: int
    """Number of released coordinates; bounds the part that the noise sampler's tail plays."""
    sampling_rate: float = 1.0
    noise_ratio: float = 1.0
    """Noise multiplier of this line relative to the plan's common one."""
    blocks: tuple[Block, ...] = ()
    """Of what `class_sums` releases, as one Gaussian."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidSettings(
                f"release '{self.name}' is of kind '{self.kind}', expected one of "
                f"{', '.join(get_args(Kind))}"
            )
        if self.count < 1 or self.dimension < 1:
            raise InvalidSettings(
                f"release '{self.name}' is planned {self.count} times with {self.dimension} "
                "coordinates, expected at least 1 of each; check the settings"
            )
        if not 0 < self.sampling_rate <= 1:
            raise InvalidSettings(
                f"release '{self.name}' has sampling rate {self.sampling_rate:g}, expected above 0 "
                "and at most 1: the expected batch must not exceed the number of units; "
                "lower the batch"
            )
        if not (self.noise_ratio > 0 and math.isfinite(self.noise_ratio)):
            raise InvalidSettings(
                f"release '{self.name}' has noise ratio {self.noise_ratio:g}, expected a positive "
                "number; check the settings"
            )


@dataclass(frozen=True)
class Plan:
    """All that a method will ever ask for, fixed before a record is read."""

    releases: tuple[PlannedRelease, ...]

    def __post_init__(self) -> None:
        names = [release.name for release in self.releases]
        if not names or len(set(names)) != len(names):
            raise InvalidSettings(
                f"a plan names its releases {names}, expected one or more different names"
            )

    def __iter__(self) -> Iterator[PlannedRelease]:
        return iter(self.releases)

    def __getitem__(self, name: str) -> PlannedRelease:
        for release in self.releases:
            if release.name == name:
                return release
        raise PlanViolation(
            f"the plan has no release called '{name}' (planned: "
            f"{', '.join(r.name for r in self.releases)}); add it to the method's plan"
        )

    @property
    def total(self) -> int:
        """Number of releases over all lines."""
        return sum(release.count for release in self.releases)

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON array, one object per line."""
        lines = [asdict(release) for release in self.releases]
        return [
            line | {"blocks": list(line["blocks"])} if line["blocks"] else _without_blocks(line)
            for line in lines
        ]

    @classmethod
    def from_json(cls, content: list[dict[str, Any]]) -> Plan:
        """Read what `to_json` returned."""
        return cls(
            tuple(
                PlannedRelease(
                    **line | {"blocks": tuple(Block(**block) for block in line.get("blocks", ()))}
                )
                for line in content
            )
        )


def _without_blocks(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "blocks"}


def one_embedding(blocks: tuple[Block, ...], facts: PublicFacts) -> Plan:
    """Plan one `class_sums` of all records."""
    dimension = sum(block.sums(facts.classes) * block.dimension for block in blocks)
    line = PlannedRelease(
        name="class_sums", kind="class_sums", count=1, dimension=dimension, blocks=blocks
    )
    return Plan((line,))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The guarantee that a run must not exceed. Epsilon `inf` means none."""

    epsilon: float
    delta: float
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise InvalidSettings(
                f"epsilon is {self.epsilon:g}, expected a positive number, or inf for no guarantee"
            )
        if not 0 < self.delta < 1:
            raise InvalidSettings(
                f"delta is {self.delta:g}, expected a number between 0 and 1, such as 1e-5"
            )

    @property
    def is_private(self) -> bool:
        """Whether there is a guarantee at all."""
        return math.isfinite(self.epsilon)

    def check_delta(self, units: int, *, allow_large: bool) -> None:
        """Refuse a delta that would permit publishing one unit in the clear."""
        if self.delta >= 1 / units and not allow_large:
            raise InvalidSettings(
                f"delta is {self.delta:g}, expected less than 1/N0 = {1 / units:.3g} for {units} "
                "units; lower it, or pass --allow-large-delta, which the certificate will state"
            )
