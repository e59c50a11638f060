"""What every method is: a frozen configuration, a plan, and a run on a curator."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from understudy.errors import InvalidSettings
from understudy.nets.released import Artefact
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput


def setting(default: Any, explain: str, *, is_path: bool = False) -> Any:
    """Declare a field of a configuration with the line that `--help` shows for it.

    Args:
        default: its value unless another is given.
        explain: the line.
        is_path: whether it may name a file or folder of the user's, which is nobody's business.
    """
    return dataclasses.field(default=default, metadata={"help": explain, "is_path": is_path})


def certified_settings(config: Any) -> dict[str, Any]:
    """Return the settings as a certificate states them: of a path, its last part alone."""
    values = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        if field.metadata.get("is_path"):
            values[field.name] = Path(values[field.name]).name
    return values


FEW_UNITS = 10_000
"""Below this many the settings of papers make no sense."""


def small_or_paper(facts: PublicFacts) -> str:
    """Choose the preset `small` for few units, as most methods do."""
    return "small" if facts.units < FEW_UNITS else "paper"


def check_at_least_one(config: Any, *names: str) -> None:
    """Refuse a setting that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise InvalidSettings(f"{name} is {getattr(config, name)}, expected at least 1")


def check_positive(config: Any, *names: str) -> None:
    """Refuse a setting that is not above 0 and finite."""
    for name in names:
        if not 0 < getattr(config, name) < float("inf"):
            raise InvalidSettings(f"{name} is {getattr(config, name)}, expected a positive number")


def check_not_negative(config: Any, *names: str) -> None:
    """Refuse a setting that is below 0, or not finite."""
    for name in names:
        if not 0 <= getattr(config, name) < float("inf"):
            raise InvalidSettings(f"{name} is {getattr(config, name)}, expected 0 or more")


@dataclass(frozen=True)
class Preset:
    """Named settings, and the honest word on where they come from."""

    settings: Callable[[PublicFacts, float, Mapping[str, Any]], dict[str, Any]]
    """Map public facts, epsilon and the settings that the user gave to settings."""
    tuned_on: str
    """What the settings were chosen on."""


class Method(Protocol):
    """A method of making what is released. Post-processing only: it never sees a record."""

    config_class: ClassVar[type]
    presets: ClassVar[dict[str, Preset]]
    summary: ClassVar[str]
    public_inputs: Sequence[PublicInput]
    """What it used that others made of public data; known after `run`."""

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose a preset by public facts."""

    def __init__(self, config: Any, facts: PublicFacts, *, seed: int) -> None:
        """Keep the configuration; draw nothing yet."""

    def plan(self) -> Plan:
        """Declare every release that `run` will ask for."""

    def run(self, curator: Curator, progress: Progress) -> Artefact:
        """Ask for the releases and make the set, or train the classifier."""


@dataclass(frozen=True)
class Configured:
    """A complete configuration and how it came about."""

    config: Any
    preset: str
    tuned_on: str


def configure(
    method: type[Method],
    facts: PublicFacts,
    epsilon: float,
    *,
    preset: str = "auto",
    settings: Mapping[str, Any] | None = None,
) -> Configured:
    """Complete the user's `settings` from a preset.

    Raises:
        InvalidSettings: an unknown preset or setting, with the nearest known one.
    """
    given = dict(settings or {})
    name = method.default_preset(facts) if preset == "auto" else preset
    if name not in method.presets:
        raise InvalidSettings(
            f"there is no preset '{name}', expected auto, {', '.join(method.presets)}"
        )
    known = [field.name for field in dataclasses.fields(method.config_class)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"
            raise InvalidSettings(f"there is no setting '{key}'; {hint}")
    chosen = method.presets[name]
    values = chosen.settings(facts, epsilon, given) | given
    return Configured(method.config_class(**values), name, chosen.tuned_on)
