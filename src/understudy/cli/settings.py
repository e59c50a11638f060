"""Flags from configuration dataclasses: every field of a method's configuration, all optional."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter

from understudy.methods import load_method


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where to compute."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    compile: bool = True
    """Compile steps and capture them as CUDA graphs on a GPU; --no-compile to debug."""


def settings_class(method: str) -> type:
    """Return a dataclass with the fields of the method's configuration, each None unless given."""
    config = load_method(method).config_class
    hints = get_type_hints(config)
    group = Group(f"Settings of {method} (by default from the preset)")
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
