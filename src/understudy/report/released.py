"""What a page shows of a released directory: everything here may be shared.

Nothing in this file is ever given a run's `private/`; a shareable page is made from it alone.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from understudy.card import factor, never_less
from understudy.charts import Chart, Series, Table, decades, line_chart, linear, power
from understudy.charts import shares as share_axis
from understudy.errors import UnderstudyError
from understudy.finished import load_released
from understudy.methods import load_method
from understudy.nets.params import parameter_count
from understudy.nets.released import Artefact, Classifier
from understudy.privacy.certificate import Certificate, Verification, implied_curve
from understudy.privacy.plan import PublicFacts
from understudy.privacy.trade_off import (
    FURTHER_DELTAS,
    SHOWN_RATES,
    attack_curve,
    most_true_positives,
)
from understudy.synthetic import SyntheticSet

PER_CLASS = 10
MOST_CLASSES = 100


@dataclass(frozen=True)
class Tile:
    """One picture that can be enlarged."""

    uri: str
    alt: str


@dataclass(frozen=True)
class SheetRow:
    """Some images of one class."""

    name: str
    tiles: tuple[Tile, ...]
    more: int


@dataclass(frozen=True)
class Released:
    """What a run has released, matching its certificate."""

    verification: Verification
    made: Artefact
    letter: str = ""
    """What it is called beside others."""

    @classmethod
    def load(cls, release: Path, verification: Verification, letter: str = "") -> Released:
        """Read what was verified."""
        return cls(verification, load_released(release), letter)

    @property
    def synthetic(self) -> SyntheticSet | None:
        """The set, if it is one."""
        return None if isinstance(self.made, Classifier) else self.made

    @property
    def classifier(self) -> Classifier | None:
        """The classifier, if it is one."""
        return self.made if isinstance(self.made, Classifier) else None

    @property
    def heading(self) -> str:
        """What it is, as the title of a page."""
        data = self.content["data_set"]["name"]
        kind = "classifier trained on" if self.classifier else "synthetic stand‑in for"
        return f"A {kind} {data}"

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        return "classifier" if self.synthetic is None else "set"

    @property
    def amount(self) -> str:
        """How much it is, for a table."""
        return "classifier" if self.synthetic is None else f"{len(self.synthetic):,}"

    @property
    def about_classifier(self) -> list[tuple[str, str]]:
        """What there is to say about a classifier."""
        found = self.classifier
        if found is None:
            return []
        numbers = [", ".join(f"{value:g}" for value in part) for part in (found.mean, found.std)]
        return [
            ("Network", f"{found.name}, {parameter_count(found.params):,} parameters"),
            ("Takes", self.shape),
            ("Classes", ", ".join(found.class_names)),
            ("Pixels are seen as", f"(p − {numbers[0]}) / {numbers[1]}, p from 0 black to 1 white"),
        ]

    @property
    def certificate(self) -> Certificate:
        """The certificate."""
        return self.verification.certificate

    @property
    def content(self) -> dict[str, Any]:
        """The certificate's content."""
        return self.certificate.content

    @property
    def facts(self) -> PublicFacts:
        """What is public about the private data."""
        return PublicFacts.from_json(self.content["data_set"]["public_facts"])

    @property
    def has_guarantee(self) -> bool:
        """Whether it is differentially private at all."""
        return self.certificate.has_guarantee

    @property
    def epsilon(self) -> str:
        """Epsilon for reading, never less than certified."""
        return f"{never_less(self.certificate.epsilon):g}" if self.has_guarantee else "∞"

    @property
    def delta(self) -> str:
        """Delta for reading."""
        return power(self.certificate.delta)

    @property
    def grounds(self) -> str:
        """What a federation's guarantee rests on; nothing for others."""
        return self.certificate.grounds

    @property
    def total(self) -> str:
        """What all runs on the data cost together when the certificate was issued."""
        total = self.content["data_set"]["composed_total"]
        epsilon = "∞" if total["epsilon"] is None else f"{never_less(total['epsilon']):g}"
        runs = "by this run alone" if total["runs"] == 1 else f"by {total['runs']} runs together"
        return f"{runs}: ε = {epsilon} at δ = {power(total['delta'])}"

    @property
    def name(self) -> str:
        """What the run is called: from the certificate, not from anyone's file system."""
        data, method = self.content["data_set"]["name"], self.content["method"]["name"]
        return f"{data}, {method}, ε = {self.epsilon}"

    @property
    def title(self) -> str:
        """The name, with the letter where there are several."""
        return f"{self.letter}: {self.name}" if self.letter else self.name

    @property
    def shape(self) -> str:
        """Size of an image, in words."""
        channels, height, width = self.facts.shape
        colours = {1: "grey", 3: "colour"}.get(channels, f"{channels} channels")
        return f"{width} × {height} pixels, {colours}"

    @property
    def factor(self) -> str:
        """E to the epsilon, as the card has it."""
        return factor(self.certificate.epsilon)

    @cached_property
    def sheet(self) -> tuple[SheetRow, ...]:
        """The contact sheet, class by class; nothing for a classifier."""
        rows: list[SheetRow] = []
        for label, name in enumerate(self.facts.class_names[:MOST_CLASSES]):
            if self.synthetic is None:
                break
            found = (self.synthetic.labels == label).nonzero().flatten().tolist()
            tiles = tuple(
                tile_of(self.synthetic, index, f"Synthetic image {place} of class {name}")
                for place, index in enumerate(found[:PER_CLASS], start=1)
            )
            rows.append(SheetRow(name, tiles, len(found) - len(tiles)))
        return tuple(rows)

    @property
    def classes_left_out(self) -> int:
        """How many classes the contact sheet leaves out."""
        return max(0, self.facts.classes - MOST_CLASSES)

    @cached_property
    def overview(self) -> Tile | None:
        """The contact sheet as one picture; None for a classifier."""
        if self.synthetic is None:
            return None
        names = self.synthetic.class_names
        alt = f"Contact sheet of {self.title}: one row per class, from {names[0]} to {names[-1]}"
        return Tile(data_uri(self.synthetic.contact_sheet()), alt)

    @cached_property
    def certified_curve(self) -> list[tuple[float, float]]:
        """All (epsilon, delta) that the certificate states."""
        guarantee = self.content["guarantee"]
        stated = {(point["epsilon"], point["delta"]) for point in guarantee["curve"]}
        stated.add((guarantee["epsilon"], guarantee["delta"]))
        return sorted(stated)

    @cached_property
    def whole_curve(self) -> list[tuple[float, float]]:
        """What is certified, and what the certified plan implies at larger deltas."""
        return self.certified_curve + implied_curve(self.certificate, FURTHER_DELTAS)

    @property
    def attacks(self) -> Table:
        """What an attacker could gain at most, at some false-positive rates."""
        rows = []
        for rate in SHOWN_RATES:
            most = most_true_positives(rate, self.whole_curve)
            stated = most_true_positives(rate, self.certified_curve)
            rows.append((f"{100 * rate:g} %", _at_most(most), _at_most(stated)))
        columns = (
            "share of false alarms",
            "share found, at most",
            "at most, by the pairs of ε and δ in the certificate alone",
        )
        return Table("Bound on membership attacks", columns, rows)

    @property
    def public_inputs(self) -> str:
        """Name what was made of public data and used here."""
        inputs = self.content["method"]["public_inputs"]
        return ", ".join(f"{one['name']} (trained on {one['trained_on']})" for one in inputs)

    @property
    def summary(self) -> str:
        """What the method does, in one line; nothing for a method that this version lacks."""
        try:
            return load_method(self.content["method"]["name"]).summary
        except UnderstudyError:
            return ""

    @property
    def plan(self) -> Table:
        """Every line of the plan."""
        rows = [
            (
                line["name"],
                line["kind"],
                f"{line['made']} of {line['count']}",
                f"{line['sampling_rate']:.4g}",
                f"{line['noise_multiplier']:.4g}",
                ", ".join(f"{bound:g}" for bound in line["bounds"] or ()) or "none",
                f"{line['dimension']:,}",
            )
            for line in self.content["releases"]
        ]
        columns = (
            "release", "kind", "made of planned", "sampling rate", "noise multiplier",
            "bound per unit", "numbers in each",
        )  # fmt: skip
        return Table("What was released of the private data, with noise", columns, rows)

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The method's settings."""
        settings: dict[str, Any] = self.content["method"]["settings"]
        return [(name.replace("_", " "), plain(value)) for name, value in settings.items()]

    @property
    def certificate_text(self) -> str:
        """The certificate as it stands in the file."""
        return self.certificate.to_bytes().decode()


def _at_most(share: float) -> str:
    """Write a bound, rounded upwards."""
    return f"{math.ceil(1000 * share - 1e-9) / 10:g} %"


def plain(value: Any) -> str:
    """Write a setting."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tile_of(synthetic: SyntheticSet, index: int, alt: str) -> Tile:
    """Return one image of a set."""
    return Tile(data_uri(synthetic.picture(index)), alt)


def data_uri(png: bytes) -> str:
    """Write a picture into the page itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def epsilon_chart(sets: Sequence[Released]) -> Chart | None:
    """Draw epsilon over delta; nothing if no set has a guarantee."""
    private = [one for one in sets if one.has_guarantee]
    if not private:
        return None
    points = [point for one in private for point in one.certified_curve]
    deltas = [delta for _, delta in points]
    series = [
        Series(
            one.letter,
            sorted((delta, epsilon) for epsilon, delta in one.certified_curve),
            style=number,
            shows_values=len(private) == 1,
        )
        for number, one in enumerate(private)
    ]
    return line_chart(
        "Certified epsilon at each delta",
        "The same guarantee read at other deltas: a smaller delta allows fewer exceptions and so "
        "has a larger epsilon. All points hold at once.",
        series,
        x=decades("delta", min(deltas), max(deltas)),
        y=linear("epsilon", 0, max(epsilon for epsilon, _ in points)),
    )


def attack_chart(sets: Sequence[Released]) -> Chart | None:
    """Draw the bound on attacks against guessing; nothing if no set has a guarantee."""
    private = [one for one in sets if one.has_guarantee]
    if not private:
        return None
    series = [
        Series(
            one.letter or "at most",
            attack_curve(one.whole_curve),
            style=number,
            has_markers=False,
            label_at=0.5 + (0.12 * (number + 1) if one.letter else 0),
            label_side="left" if one.letter else "right",
        )
        for number, one in enumerate(private)
    ]
    guessing = Series(
        "guessing",
        [(0, 0), (0.5, 0.5), (1, 1)],
        style=3,
        has_markers=False,
        label_at=0.5,
        label_side="right",
    )
    return line_chart(
        "Best possible attack against guessing",
        "How often any attacker could rightly say that one unit was in the data (upwards), for "
        "how often they would say so wrongly (to the right). The diagonal is blind guessing; the "
        "closer the curve, the stronger the guarantee.",
        [*series, guessing],
        x=share_axis("false alarms"),
        y=share_axis("found, at most"),
    )
