"""`understudy register`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.pipeline import load_data, register
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import RegistrationTerms


def command(
    data: str,
    *,
    terms: Annotated[RegistrationTerms | None, Parameter(name="*")] = None,
    unit: str = "record",
    classes: int | None = None,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Enter a data set into the ledger, with its unit, budget and hold-out.

    Parameters
    ----------
    data
        Name of a built-in set, or path of an .npz file.
    unit
        Unit of privacy: `record`, or the array that names each image's unit.
    classes
        Number of classes, if not the largest label plus one.
    ledger
        The ledger, if not the user's own.
    """
    out = make_output(output)
    book = Ledger(ledger)
    found = register(load_data(data, unit=unit, classes=classes), ledger=book, terms=terms)
    facts = found.facts
    limit = f"lifetime epsilon {found.lifetime_epsilon:g}" if found.has_limit else "no limit"
    held = f", {100 * found.hold_out:g} % of the units held out" if found.hold_out else ""
    out.result(
        f"'{found.name}': {facts.units} units (each a {facts.unit}), {facts.classes} classes, "
        f"shape {facts.shape}, {limit}{held}",
        name=found.name,
        units=facts.units,
        unit=facts.unit,
        lifetime_epsilon=found.lifetime_epsilon,
    )
