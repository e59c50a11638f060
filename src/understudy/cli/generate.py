"""`understudy generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.cli.settings import (
    MachineOptions,
    PlaceOptions,
    RunOptions,
    given,
    guarantee,
    settings_class,
)
from understudy.data.reading import Reading
from understudy.methods import check_makes_images
from understudy.methods.choosing import AUTO
from understudy.pipeline import load_data, synthesize
from understudy.privacy.registration import RegistrationTerms

DEFAULT_METHOD = AUTO


def build(method: str) -> Callable[..., None]:
    """Return the command with the settings of `method` as flags."""
    check_makes_images(method)
    settings_type = settings_class(method)

    def generate(
        data: str,
        *,
        method: str = DEFAULT_METHOD,
        keep_private_state: bool = False,
        options: Annotated[RunOptions | None, Parameter(name="*")] = None,
        place: Annotated[PlaceOptions | None, Parameter(name="*")] = None,
        reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
        terms: Annotated[RegistrationTerms | None, Parameter(name="*")] = None,
        machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
        output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
        settings: Any = None,
    ) -> None:
        """Make a synthetic set from private data.

        A set that the ledger does not know is registered first, and what is said then is fixed for
        good: unit, records per unit, hold-out, limit and classes; the first run fixes delta. What
        was made with noise goes to `release/`; `private/` stays with you.

        Parameters
        ----------
        data
            Name of a known set (digits, mnist, ...), or path of a folder or file of images.
        method
            Method of generation, see `understudy methods`; auto chooses one and says why.
        keep_private_state
            Let a method with teachers write what they learned to private/, to be able to resume; it
            is deleted at the end of the run.
        """
        out = make_output(output)
        result = synthesize(
            load_data(data, progress=out, **vars(reading or Reading())),
            method=method,
            keep_private_state=keep_private_state,
            **vars(options or RunOptions()),
            **(place or PlaceOptions()).asked(),
            settings=given(settings),
            terms=terms,
            **vars(machine or MachineOptions()),
            progress=out,
        )
        certificate = result.certificate
        out.result(
            f"{len(result.labels)} synthetic images, {guarantee(certificate)}: "
            f"{result.directory}/release",
            directory=str(result.directory),
            images=len(result.labels),
            epsilon=certificate.epsilon,
            delta=certificate.delta,
        )

    generate.__annotations__["settings"] = Annotated[settings_type | None, Parameter(name="*")]
    return generate
