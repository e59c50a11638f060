"""Registration: a data set enters the ledger once, and what is public about it is fixed there.

A keyed digest of the records recognises a registered set whatever its path, and tells a changed one
from it. The digest never leaves the ledger.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.data.images import LabelledImages
from understudy.data.reading import RECORD
from understudy.errors import (
    BudgetRefused,
    DataChanged,
    InvalidData,
    InvalidSettings,
    RelationMixed,
)
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import RELATION, PublicFacts

DEFAULT_NORMALISATION = 0.5


@dataclass(frozen=True, kw_only=True)
class RegistrationTerms:
    """What the custodian declares when a data set is registered."""

    name: str | None = None
    """Name in the ledger and in the certificate; by default the file's."""
    lifetime_epsilon: float | None = None
    """What all runs on this set together may spend; by default no limit, only a running total. Runs
    are added up by a Rényi filter, so a single run needs a limit somewhat above its own epsilon."""
    hold_out: float = 0.0
    """Share of the units set aside for evaluation, secretly and for good."""
    max_per_unit: int | None = None
    """Records used of each unit; by default all."""
    new_version_of: str | None = None
    """Register a changed set as a new version: it shares the budget of the old one."""
    unrelated: bool = False
    """Register a changed set as having no unit in common with the old one (recorded)."""
    public_benchmark: bool = False
    """The set is public, such as MNIST: never refused, and certificates say so."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A registered data set, as the ledger knows it."""

    id: int
    name: str
    budget: int
    facts: PublicFacts
    relation: str
    lineage: str
    """`first`, `version of NAME`, or `declared unrelated`."""
    lifetime_epsilon: float | None
    is_public_benchmark: bool
    hold_out: float
    secret: bytes = field(repr=False)

    @property
    def has_limit(self) -> bool:
        """Whether runs can be refused."""
        return self.lifetime_epsilon is not None and not self.is_public_benchmark

    @property
    def described(self) -> str:
        """What was fixed, for the custodian to read."""
        facts, said = self.facts, "no limit"
        if self.is_public_benchmark:
            said += " (a public benchmark is never refused"
            said += ", whatever --lifetime-epsilon says)" if self.lifetime_epsilon else ")"
        elif self.lifetime_epsilon is not None:
            said = f"lifetime epsilon {self.lifetime_epsilon:g}"
        most = f", of at most {facts.max_per_unit} records" if facts.max_per_unit else ""
        held = f", {100 * self.hold_out:g} % of the units held out" if self.hold_out else ""
        return (
            f"'{self.name}': {facts.units} units (each a {facts.unit}{most}), {facts.classes} "
            f"classes, shape {facts.shape}, {said}{held}"
        )

    def split_units(self, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (units to learn from, units held out): a secret choice that never changes.

        It depends on the number of units alone, so emptying one slot moves no other unit.
        """
        held = total - self.facts.units
        if held == 0:
            return np.arange(total), np.arange(0)

        # Not a library's shuffle: a later version of it might choose others.
        def rank(unit: int) -> bytes:
            return hmac.digest(self.secret, unit.to_bytes(8, "big"), "sha256")

        order = np.array(sorted(range(total), key=rank))
        return np.sort(order[held:]), np.sort(order[:held])


@dataclass(frozen=True)
class _Fingerprint:
    """Keyed digests of a data set: of the whole, of its pixels alone, of each image."""

    whole: bytes
    pixels: bytes
    images: set[bytes]

    @classmethod
    def of(cls, ledger: Ledger, data: LabelledImages, *, each: bool = False) -> _Fingerprint:
        pixels, labels, units = (
            memoryview(np.ascontiguousarray(array).view(np.uint8).reshape(-1))  # type: ignore[arg-type]
            for array in (data.images, data.labels, data.units)
        )
        facts = [data.images.shape, data.class_names, data.unit]
        header = json.dumps([*facts, data.among] if data.among else facts).encode()
        size = len(pixels) // len(data.images)
        single = (pixels[at : at + size] for at in range(0, len(pixels), size)) if each else ()
        return cls(
            ledger.mac(header, pixels, labels, units), ledger.mac(pixels), ledger.tags(single)
        )


def is_registered_as(ledger: Ledger, data: LabelledImages, registration: Registration) -> bool:
    """Say whether `data` holds exactly the records of `registration`."""
    (row,) = ledger.data_sets("id = ?", (registration.id,))
    return bool(row["digest"] == _Fingerprint.of(ledger, data).whole)


def find(ledger: Ledger, data: LabelledImages, *, name: str | None = None) -> Registration | None:
    """Return the registration of exactly this data set, or None when it is new.

    Raises:
        DataChanged: its name or path is registered with other records, or its pixels with other
            labels, classes or units.
    """
    fingerprint = _Fingerprint.of(ledger, data)
    if (same := _same(ledger, fingerprint, name)) is not None:
        return same
    _refuse_changed(ledger, data, fingerprint, name)
    return None


def find_exactly(ledger: Ledger, data: LabelledImages) -> Registration | None:
    """Return the registration of exactly this data set, or None."""
    return _same(ledger, _Fingerprint.of(ledger, data), None)


def _same(ledger: Ledger, fingerprint: _Fingerprint, name: str | None) -> Registration | None:
    rows = ledger.data_sets("digest = ?", (fingerprint.whole,))
    if rows and name not in (None, rows[0]["name"]):
        raise DataChanged(
            f"this data set is registered as '{rows[0]['name']}', not '{name}'; use that name"
        )
    return _from_row(rows[0]) if rows else None


def _refuse_changed(
    ledger: Ledger, data: LabelledImages, fingerprint: _Fingerprint, name: str | None
) -> None:
    """Refuse a set whose name, path or pixels are registered with something else."""
    known = [
        row
        for row in ledger.data_sets(
            "name = ? OR source = ? OR pixels = ?", (name, data.source, fingerprint.pixels)
        )
        if name == row["name"] or row["pixels"] == fingerprint.pixels or not _is_apart(row, data)
    ]
    if not known:
        return
    row, what = known[-1], data.source or data.name
    facts = PublicFacts.from_json(json.loads(row["facts"]))
    if row["pixels"] == fingerprint.pixels and facts.unit != data.unit:
        raise DataChanged(
            f"{what} is registered as '{row['name']}' with unit {facts.unit}, now it is read with "
            f"unit {data.unit}; pass the --unit that it was registered with"
        )
    raise DataChanged(
        f"{what} does not hold what was registered as '{row['name']}'; pass --new-version-of "
        f"{row['name']} to go on with its budget, or --unrelated if no unit is in both"
    )


def _refuse_shared(
    ledger: Ledger, data: LabelledImages, fingerprint: _Fingerprint, parent: Registration | None
) -> None:
    """Refuse a set that shares images, or its place on disk, with one of another budget.

    A record in two sets with a budget each would be protected by neither. Public benchmarks have no
    budget to protect.
    """
    if data.is_public_benchmark:
        return
    budget = parent.budget if parent else None
    for row in ledger.shared_images(fingerprint.images):
        if row["budget"] != budget and not row["is_public_benchmark"]:
            raise DataChanged(
                f"{row['shared']} of the images are also in '{row['name']}'; pass --new-version-of "
                f"{row['name']} to share its budget, or --unrelated if they are of nobody in both"
            )
    for row in ledger.data_sets("NOT is_public_benchmark"):
        is_near = _overlap(row["source"], data.source) and not _is_apart(row, data)
        if row["budget"] != budget and is_near:
            raise DataChanged(
                f"{data.source} lies in, or holds, what was registered as '{row['name']}'; pass "
                f"--new-version-of {row['name']} to share its budget, or --unrelated if no unit is "
                "in both"
            )


def _is_apart(row: sqlite3.Row, data: LabelledImages) -> bool:
    """Say whether a registered set and this one are parts of one source that may stand beside it.

    Parts of a public benchmark always may: there is no budget to protect.
    """
    facts = PublicFacts.from_json(json.loads(row["facts"]))
    if row["source"] != data.source or not (facts.among or data.among):
        return False
    is_public = bool(row["is_public_benchmark"]) and data.is_public_benchmark
    return is_public or are_parts(facts, declared_facts(data, RegistrationTerms()))


def are_parts(one: PublicFacts, other: PublicFacts) -> bool:
    """Say whether sets of one source are parts of it by class, so that no record is in both.

    A record has one class; a unit of several records may have more.
    """
    return (
        one.unit == other.unit == RECORD
        and one.shape == other.shape
        and one.among == other.among != ()
        and set(one.class_names).isdisjoint(other.class_names)
    )


def _overlap(one: str | None, other: str | None) -> bool:
    if not one or not other:
        return False
    a, b = Path(one), Path(other)
    return a.is_absolute() and b.is_absolute() and (a.is_relative_to(b) or b.is_relative_to(a))


def refuse_private(ledger: Ledger, data: LabelledImages) -> None:
    """Refuse to treat a set as public if the ledger knows any of its images as private.

    Images that were changed, scaled say, are other images; a set's place on disk still shows it.

    Raises:
        DataChanged: an image, or the place on disk, belongs to a registered private set.
    """
    if data.is_public_benchmark:
        return
    for row in ledger.shared_images(_Fingerprint.of(ledger, data, each=True).images):
        if not row["is_public_benchmark"]:
            raise DataChanged(
                f"{row['shared']} of the images of {data.name} are in '{row['name']}', which is "
                "registered as private; public data must not hold private images; use another set"
            )
    for row in ledger.data_sets("NOT is_public_benchmark"):
        if _overlap(row["source"], data.source):
            raise DataChanged(
                f"{data.source} lies in, or holds, what is registered as '{row['name']}', which is "
                "private; public data must not hold private images; use another set"
            )


def all_registered(ledger: Ledger) -> list[Registration]:
    """Return every registered data set, oldest first."""
    return [_from_row(row) for row in ledger.data_sets()]


def register(ledger: Ledger, data: LabelledImages, terms: RegistrationTerms) -> Registration:
    """Register a new data set, or a new version of one; return an existing registration unchanged.

    The number of units (N0), class names, shape and normalisation become public facts here and are
    never computed again.
    """
    fingerprint = _Fingerprint.of(ledger, data, each=True)
    # One transaction from the look-up on: of two processes that race, one finds it registered.
    with ledger.transaction() as execute:
        if (existing := _same(ledger, fingerprint, terms.name)) is not None:
            _check_same_terms(existing, terms)
            return existing
        facts = declared_facts(data, terms)
        parent = _parent(ledger, data, terms, facts)
        if not terms.unrelated:
            if parent is None:
                _refuse_changed(ledger, data, fingerprint, terms.name)
            _refuse_shared(ledger, data, fingerprint, parent)
        elif ledger.data_sets("pixels = ?", (fingerprint.pixels,)):
            raise DataChanged("these very images are registered already, so they are not unrelated")
        return _insert(execute, data, terms, facts, parent=parent, fingerprint=fingerprint)


def declared_facts(data: LabelledImages, terms: RegistrationTerms) -> PublicFacts:
    """Return what would become public if `data` were registered under `terms`."""
    _check_terms(terms)
    total = int(data.units.max()) + 1
    held = round(terms.hold_out * total)
    if terms.hold_out and not held:
        raise InvalidData(
            f"a share of {terms.hold_out:g} of {total} units is none, expected at least one to "
            "hold out; raise --hold-out, or leave it out"
        )
    if total - held < 1:
        raise InvalidData(
            f"the set has {total} units and {held} would be held out, expected at least one to "
            "learn from; lower --hold-out"
        )
    channels = data.shape[0]
    public = data.normalisation
    return PublicFacts(
        units=total - held,
        class_names=data.class_names,
        shape=data.shape,
        mean=public.mean if public else (DEFAULT_NORMALISATION,) * channels,
        std=public.std if public else (DEFAULT_NORMALISATION,) * channels,
        unit=data.unit,
        max_per_unit=terms.max_per_unit,
        among=data.among,
    )


def _insert(
    execute: Any,
    data: LabelledImages,
    terms: RegistrationTerms,
    facts: PublicFacts,
    *,
    parent: Registration | None,
    fingerprint: _Fingerprint,
) -> Registration:
    lineage = "declared unrelated" if terms.unrelated else "first"
    is_public = terms.public_benchmark or data.is_public_benchmark
    # A new version cannot escape the limit of the set that it replaces.
    is_exempt = is_public and (parent is None or parent.is_public_benchmark)
    taken = {row[0] for row in execute("SELECT name FROM data_sets")}
    row = execute(
        "INSERT INTO data_sets (name, budget, digest, pixels, source, facts, relation, lineage,"
        " lifetime_epsilon, is_public_benchmark, hold_out, secret, registered)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
        (
            _free_name(terms.name or data.name, taken),
            parent.budget if parent else 0,
            fingerprint.whole,
            fingerprint.pixels,
            data.source,
            json.dumps(facts.to_json()),
            RELATION,
            f"version of {parent.name}" if parent else lineage,
            parent.lifetime_epsilon if parent else terms.lifetime_epsilon,
            is_exempt,
            terms.hold_out,
            secrets.token_bytes(32),
            time.time(),
        ),
    ).fetchone()
    if parent is None:
        execute("UPDATE data_sets SET budget = id WHERE id = ?", (row["id"],))
    if not is_exempt:
        for tag in fingerprint.images:
            execute("INSERT INTO images VALUES (?, ?)", (tag, row["id"]))
    return _from_row(execute("SELECT * FROM data_sets WHERE id = ?", (row["id"],)).fetchone())


def _parent(
    ledger: Ledger, data: LabelledImages, terms: RegistrationTerms, facts: PublicFacts
) -> Registration | None:
    """Return the data set that this one is a new version of, its terms being compatible."""
    if terms.new_version_of is None:
        return None
    rows = ledger.data_sets("name = ?", (terms.new_version_of,))
    if not rows:
        raise InvalidSettings(
            f"no data set is called '{terms.new_version_of}'; see `understudy ledger`"
        )
    parent = _from_row(rows[0])
    if _counted(parent.facts) != _counted(facts):
        raise RelationMixed(
            f"'{parent.name}' counts units as {_counted(parent.facts)}, this version as "
            f"{_counted(facts)}; one budget has one unit, so pass the same --unit and "
            "--max-per-unit"
        )
    if parent.is_public_benchmark and not (data.is_public_benchmark or terms.public_benchmark):
        raise RelationMixed(
            f"'{parent.name}' is a public benchmark, so it has no budget to share; register this "
            "set by itself"
        )
    if terms.lifetime_epsilon not in (None, parent.lifetime_epsilon):
        raise BudgetRefused(
            f"'{parent.name}' has {_limited(parent)}, which its versions share; leave out "
            "--lifetime-epsilon"
        )
    return parent


def _free_name(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def _check_terms(terms: RegistrationTerms) -> None:
    if terms.lifetime_epsilon is not None and not (
        terms.lifetime_epsilon > 0 and math.isfinite(terms.lifetime_epsilon)
    ):
        raise InvalidSettings(
            f"lifetime epsilon is {terms.lifetime_epsilon:g}, expected a positive number"
        )
    if not 0 <= terms.hold_out < 1:
        raise InvalidSettings(
            f"hold-out is {terms.hold_out:g}, expected a share from 0 to below 1, such as 0.1"
        )
    if terms.max_per_unit is not None and terms.max_per_unit < 1:
        raise InvalidSettings(f"max-per-unit is {terms.max_per_unit}, expected at least 1")
    if terms.new_version_of is not None and terms.unrelated:
        raise InvalidSettings("--new-version-of and --unrelated contradict each other; pass one")


def _check_same_terms(existing: Registration, terms: RegistrationTerms) -> None:
    """Terms are fixed at the first registration: refuse others rather than ignore them."""
    if terms.lifetime_epsilon not in (None, existing.lifetime_epsilon):
        raise BudgetRefused(
            f"'{existing.name}' is registered with {_limited(existing)}, which cannot be changed "
            f"to {terms.lifetime_epsilon:g}; leave out --lifetime-epsilon"
        )
    for flag, found, wanted in (
        ("hold-out", existing.hold_out or None, terms.hold_out or None),
        ("max-per-unit", existing.facts.max_per_unit, terms.max_per_unit),
    ):
        if wanted not in (None, found):
            how = f"without --{flag}" if found is None else f"with --{flag} {found}"
            raise RelationMixed(
                f"'{existing.name}' is registered {how}, not with {wanted}; leave the option out: "
                "it is fixed for good"
            )


def _counted(facts: PublicFacts) -> str:
    """Say what a budget counts as one."""
    most = f"at most {facts.max_per_unit}" if facts.max_per_unit else "all"
    return f"{facts.unit} ({most} records each)"


def _limited(registration: Registration) -> str:
    limit = registration.lifetime_epsilon
    return "no limit" if limit is None else f"lifetime epsilon {limit:g}"


def _from_row(row: object) -> Registration:
    columns = dict(row)  # type: ignore[call-overload]
    return Registration(
        id=columns["id"],
        name=columns["name"],
        budget=columns["budget"],
        facts=PublicFacts.from_json(json.loads(columns["facts"])),
        relation=columns["relation"],
        lineage=columns["lineage"],
        lifetime_epsilon=columns["lifetime_epsilon"],
        is_public_benchmark=bool(columns["is_public_benchmark"]),
        hold_out=columns["hold_out"],
        secret=columns["secret"],
    )
