"""`understudy train-classifier`."""

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
from understudy.methods import check_makes_classifier
from understudy.pipeline import load_data, train_classifier
from understudy.privacy.registration import RegistrationTerms

DEFAULT_METHOD = "dp-sgd"


def build(method: str) -> Callable[..., None]:
    """Return the command with the settings of `method` as flags."""
    check_makes_classifier(method)
    settings_type = settings_class(method)

    def train(
        data: str,
        *,
        method: str = DEFAULT_METHOD,
        options: Annotated[RunOptions | None, Parameter(name="*")] = None,
        place: Annotated[PlaceOptions | None, Parameter(name="*")] = None,
        reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
        terms: Annotated[RegistrationTerms | None, Parameter(name="*")] = None,
        machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
        output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
        settings: Any = None,
    ) -> None:
        """Train a classifier on private data; the network is released, and no images.

        A set that the ledger does not know is registered first, and what is said then is fixed for
        good: unit, records per unit, hold-out, limit and classes; the first run fixes delta. What
        was made with noise goes to `release/`; `private/` stays with you.

        Parameters
        ----------
        data
            Name of a known set (digits, mnist, ...), or path of a folder or file of images.
        method
            Method of training; see `understudy methods`.
        """
        out = make_output(output)
        result = train_classifier(
            load_data(data, progress=out, **vars(reading or Reading())),
            method=method,
            **vars(options or RunOptions()),
            **(place or PlaceOptions()).asked(),
            settings=given(settings),
            terms=terms,
            **vars(machine or MachineOptions()),
            progress=out,
        )
        certificate, made = result.certificate, result.classifier
        out.result(
            f"a classifier of {len(made.class_names)} classes, {guarantee(certificate)}: "
            f"{result.directory}/release",
            directory=str(result.directory),
            classes=len(made.class_names),
            epsilon=certificate.epsilon,
            delta=certificate.delta,
        )

    train.__annotations__["settings"] = Annotated[settings_type | None, Parameter(name="*")]
    return train
