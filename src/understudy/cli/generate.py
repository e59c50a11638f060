"""`understudy generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.cli.settings import MachineOptions, given, settings_class
from understudy.data.reading import Reading
from understudy.pipeline import load_data, synthesize
from understudy.privacy.registration import RegistrationTerms

DEFAULT_METHOD = "psg"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run is asked for."""

    method: str = DEFAULT_METHOD
    """Method of generation; see `understudy methods`."""
    epsilon: float = 10.0
    """Privacy budget of the run; `inf` adds no noise and gives no guarantee."""
    delta: float = 1e-5
    """Probability outside the guarantee; below 1/N0."""
    accountant: Literal["pld", "renyi"] = "pld"
    """Privacy-loss distributions (less noise), or Rényi as the papers did."""
    preset: str = "auto"
    """Named settings of the method."""
    seed: int = 0
    """Seed of public randomness. Batches and noise are secret and do not follow it."""
    snapshots: int = 0
    """How many sets to keep on the way, in private/, to see how accuracy grew with epsilon."""
    keep_private_state: bool = False
    """Let a method with teachers write what they learned to private/, to be able to resume; it is
    deleted at the end of the run."""
    allow_large_delta: bool = False
    """Accept delta >= 1/N0; the certificate will say so."""


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where a run goes, and what it is charged to."""

    out: Path | None = None
    """Directory of the run; by default runs/DATA-METHOD-epsEPSILON."""
    resume: bool = False
    """Go on with an unfinished run: the same command plus this flag."""
    ledger: Path | None = None
    """The ledger, if not the user's own."""
    config: Path | None = None
    """TOML file with any of these options; flags on the command line win."""


def build(method: str) -> Callable[..., None]:
    """Return the command with the settings of `method` as flags."""
    settings_type = settings_class(method)

    def generate(
        data: str,
        *,
        options: Annotated[RunOptions | None, Parameter(name="*")] = None,
        place: Annotated[PlaceOptions | None, Parameter(name="*")] = None,
        reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
        terms: Annotated[RegistrationTerms | None, Parameter(name="*")] = None,
        machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
        output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
        settings: Any = None,
    ) -> None:
        """Make a synthetic set from private data.

        Parameters
        ----------
        data
            Name of a known set (digits, mnist, ...), or path of a folder or file of images.
        """
        place = place or PlaceOptions()
        out = make_output(output)
        result = synthesize(
            load_data(data, progress=out, **vars(reading or Reading())),
            out=place.out,
            ledger=place.ledger,
            resume=place.resume,
            terms=terms,
            **vars(machine or MachineOptions()),
            progress=out,
            **vars(options or RunOptions()),
            settings=given(settings),
        )
        certificate = result.certificate
        guarantee = (
            f"epsilon {certificate.epsilon:.4f} at delta {certificate.delta:g}"
            if certificate.has_guarantee
            else "WITHOUT any guarantee"
        )
        out.result(
            f"{len(result.labels)} synthetic images, {guarantee}: {result.directory}/release",
            directory=str(result.directory),
            images=len(result.labels),
            epsilon=certificate.epsilon,
            delta=certificate.delta,
        )

    generate.__annotations__["settings"] = Annotated[settings_type | None, Parameter(name="*")]
    return generate
