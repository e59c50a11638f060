"""Flags that commands share: of a run, of the machine, of a method's configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter

from understudy.methods import load_method
from understudy.methods.choosing import AUTO, Common
from understudy.privacy.certificate import Certificate


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where to compute."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    compile: bool = True
    """Compile steps and capture them as CUDA graphs on a GPU; --no-compile to debug."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run is asked for."""

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
    """How many states to keep on the way, in private/, to see how accuracy grew with epsilon."""
    secure_noise: bool = False
    """Draw private batches and noise from a cipher (AES-256); the certificate will say so."""
    allow_large_delta: bool = False
    """Accept delta >= 1/N0; the certificate will say so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where a run goes, and what it is charged to."""

    out: Path | None = None
    """Directory of the run; by default runs/DATA-METHOD-epsEPSILON, numbered where it exists: the
    same command without --resume is a new run, and is charged again."""
    resume: bool = False
    """Go on with an unfinished run: the same command plus this flag."""
    ledger: Path | None = None
    """The ledger, if not the user's own."""
    config: Path | None = None
    """TOML file with any of these options; flags on the command line win."""

    def asked(self) -> dict[str, Any]:
        """Return them as arguments of the library, which knows no configuration files."""
        return {name: value for name, value in vars(self).items() if name != "config"}


def guarantee(certificate: Certificate) -> str:
    """Say in a few words what is guaranteed."""
    if not certificate.has_guarantee:
        return "WITHOUT any guarantee"
    return f"epsilon {certificate.epsilon:.4f} at delta {certificate.delta:g}"


def settings_class(method: str) -> type:
    """Return a dataclass with the fields of the method's configuration, each None unless given."""
    config = Common if method == AUTO else load_method(method).config_class
    hints = get_type_hints(config)
    # A longer title would be cut off on a terminal of 80 columns.
    whose = "all methods; --method has more" if method == AUTO else method
    group = Group(f"Settings of {whose} (by default the preset's)")
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        explained = Parameter(help=field.metadata["help"], group=group)
        kind = Annotated[hints[field.name] | None, explained]  # type: ignore[valid-type, name-defined]
        fields.append((field.name, kind, dataclasses.field(default=None)))
    return dataclasses.make_dataclass(
        "Settings", fields, frozen=True, kw_only=True, namespace={"__module__": __name__}
    )


def given(settings: Any) -> dict[str, Any]:
    """Return the settings that the user gave."""
    if settings is None:
        return {}
    return {key: value for key, value in vars(settings).items() if value is not None}
