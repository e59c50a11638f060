"""`understudy register`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.data.reading import Reading
from understudy.pipeline import load_data, register
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import RegistrationTerms


def command(
    data: str,
    *,
    terms: Annotated[RegistrationTerms | None, Parameter(name="*")] = None,
    reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Enter a data set into the ledger, with its unit, budget and hold-out.

    Say all of it the first time, and read the line that this prints: unit, records per unit,
    hold-out, limit and classes are fixed for good, and the first run fixes delta.

    Parameters
    ----------
    data
        Name of a known set (digits, mnist, ...), or path of a folder or file of images.
    ledger
        The ledger, if not the user's own.
    """
    out = make_output(output)
    images = load_data(data, progress=out, **vars(reading or Reading()))
    book = Ledger(ledger)
    found = register(images, ledger=book, terms=terms)
    out.result(
        found.described,
        name=found.name,
        units=found.facts.units,
        unit=found.facts.unit,
        lifetime_epsilon=found.lifetime_epsilon if found.has_limit else None,
    )
