"""`understudy methods`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.methods import METHODS, load_method


def command(
    name: str | None = None,
    *,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """List the methods, or the settings of one.

    Parameters
    ----------
    name
        A method.
    """
    out = make_output(output)
    if name is None:
        rows = [(m, load_method(m).summary, ", ".join(load_method(m).presets)) for m in METHODS]
        out.table("Methods", ("method", "what it makes", "presets"), rows)
        return
    method = load_method(name)
    fields = dataclasses.fields(method.config_class)
    settings = [(f.name, str(f.default), f.metadata["help"]) for f in fields]
    out.table(
        f"Settings of {name}", ("setting", "unless the preset says otherwise", "meaning"), settings
    )
    presets = [(p, preset.tuned_on) for p, preset in method.presets.items()]
    out.table("Presets", ("preset", "tuned on"), presets)
