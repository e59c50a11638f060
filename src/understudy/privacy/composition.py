"""What several released sets cost together: the largest epsilon, or the sum.

Where no unit is in two of the data sets, everybody is protected by the one certificate that covers
them, so the largest epsilon holds for all (parallel composition). Otherwise somebody may be in each
of them, and epsilons and deltas add up, also if a set was made by who had seen earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from understudy.data.reading import RECORD
from understudy.errors import InvalidSettings, RelationMixed
from understudy.privacy.certificate import Certificate, is_issued_with
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import Registration, all_registered, are_parts

Kind = Literal["proved", "declared", "sum"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one certificate says."""

    data_set: str
    run: str
    method: str
    classes: tuple[str, ...]
    units: int
    unit: str
    epsilon: float | None
    """None without a guarantee."""
    delta: float
    runs: int
    """Runs on this data set when the certificate was issued, the certified one among them."""
    composed_epsilon: float | None
    """What these runs cost together."""

    @classmethod
    def of(cls, certificate: Certificate) -> Part:
        """Read a verified certificate."""
        content = certificate.content
        data_set, facts = content["data_set"], content["data_set"]["public_facts"]
        return cls(
            data_set=data_set["name"],
            run=content["run"],
            method=content["method"]["name"],
            classes=tuple(facts["class_names"]),
            units=facts["units"],
            unit=facts["unit"],
            epsilon=certificate.epsilon if certificate.has_guarantee else None,
            delta=certificate.delta,
            runs=data_set["composed_total"]["runs"],
            composed_epsilon=data_set["composed_total"]["epsilon"],
        )


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What sets cost together, and why."""

    kind: Kind
    """`proved` disjoint by the ledger, `declared` disjoint by the parties, or the `sum`."""
    epsilon: float | None
    """None if one of the sets has no guarantee."""
    delta: float
    units: tuple[str, ...]
    """What is protected: a record, a patient."""
    why: str
    parts: tuple[Part, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def compose(
    certificates: Sequence[Certificate], *, ledger: Ledger | None = None, declared: bool = False
) -> Statement:
    """State what verified sets cost together.

    Args:
        certificates: of the sets, each verified.
        ledger: the one that all data sets are registered in, if there is such.
        declared: whether the parties declare that no unit is in two of the data sets.

    Raises:
        InvalidSettings: what is declared contradicts the ledger, or a set is given twice.
        RelationMixed: units of different kinds may be in several sets.
    """
    _refuse_twice(certificates)
    parts = tuple(map(Part.of, certificates))
    units = tuple(dict.fromkeys(part.unit for part in parts))
    pairs, knows_all = _known(ledger, certificates)
    if (shared := [pair for pair in pairs if pair.is_shared]) and declared:
        raise InvalidSettings(
            f"the sets are declared disjoint, but {shared[0].why}; leave out --declare-disjoint"
        )
    unproved = [pair for pair in pairs if not pair.is_disjoint]
    is_proved = knows_all and not unproved
    kind: Kind = "proved" if is_proved else "declared" if declared else "sum"
    if kind == "sum" and len(units) > 1:
        raise RelationMixed(
            f"the sets protect units of different kinds ({', '.join(units)}), whose guarantees "
            "cannot be added up; pass --declare-disjoint if no unit is in two of them"
        )
    if is_proved:
        why = "one ledger knows all data sets, and no record is in two of them"
    elif declared:
        why = "the parties declare that no unit is in two of the data sets; nothing here proves it"
    elif shared or knows_all:
        why = (shared or unproved)[0].why
    else:
        why = "no ledger here knows all of the data sets, and nobody declares them disjoint"
    together = math.fsum if kind == "sum" else max
    epsilons = [part.epsilon for part in parts if part.epsilon is not None]
    return Statement(
        kind=kind,
        epsilon=together(epsilons) if len(epsilons) == len(parts) else None,
        delta=together([part.delta for part in parts]),
        units=units,
        why=why,
        parts=parts,
    )


def _refuse_twice(certificates: Sequence[Certificate]) -> None:
    """Refuse a set that is given twice: it is not disjoint from itself, and costs once.

    A federation's run is named by its folder, as another's may be, so its seal tells it apart.
    """
    seen = set()
    for content in (certificate.content for certificate in certificates):
        one = content["seal"] if "federation" in content else content["run"]
        if one in seen:
            raise InvalidSettings(f"run {content['run']} is given twice; name each set once")
        seen.add(one)


@dataclass(frozen=True)
class Kinship:
    """What a ledger knows about the units of two of its data sets."""

    why: str
    is_disjoint: bool = False
    """Proved: no unit is in both."""
    is_shared: bool = False
    """Known: they are one set, versions of one, or have images in common."""


def kinship(ledger: Ledger, one: Registration, other: Registration) -> Kinship:
    """Say whether two registered data sets can have a unit in common.

    Private sets are compared image by image; public benchmarks, whose images the ledger does not
    keep, by their classes if they are parts of one. Units of several records cannot be told apart,
    but an image in common shows that they are not.
    """
    names = f"'{one.name}' and '{other.name}'"
    if one.budget == other.budget:
        return Kinship(f"{names} are one data set, or versions of one", is_shared=True)
    if common := ledger.common_images(one.id, other.id):
        return Kinship(f"{names} have {common} images in common", is_shared=True)
    if not one.facts.unit == other.facts.unit == RECORD:
        return Kinship(f"{names} have units of several records, which may be in both")
    if one.is_public_benchmark and other.is_public_benchmark:
        sources = {row["source"] for row in ledger.data_sets("id IN (?, ?)", (one.id, other.id))}
        is_split = len(sources) == 1 and are_parts(one.facts, other.facts)
        what = "are" if is_split else "are not known to be"
        return Kinship(f"{names} {what} different classes of one data set", is_disjoint=is_split)
    if one.facts.shape != other.facts.shape or one.is_public_benchmark != other.is_public_benchmark:
        return Kinship(f"the images of {names} cannot be compared")
    return Kinship(f"{names} have 0 images in common", is_disjoint=True)


def _known(
    ledger: Ledger | None, certificates: Sequence[Certificate]
) -> tuple[list[Kinship], bool]:
    """Return what the ledger knows of each pair of its own data sets, and whether all are."""
    if ledger is None:
        return [], False
    own = [one for one in certificates if is_issued_with(one, ledger)]
    registered = {one.id: one for one in all_registered(ledger)}
    data_sets: list[Registration] = []
    for certificate in own:
        row = ledger.run(certificate.content["run"])
        assert row is not None  # it issued the certificate
        data_sets.append(registered[row["data_set"]])
    pairs = [kinship(ledger, one, other) for one, other in combinations(data_sets, 2)]
    return pairs, len(own) == len(certificates)
