"""`understudy verify`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.finished import verify


def command(
    run: Path,
    *,
    ledger: bool = False,
    ledger_path: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Check what was released against its certificate.

    Anyone can check the files and recompute epsilon; the custodian can also check, with the ledger,
    that the certificate is the one that was issued.

    Parameters
    ----------
    run
        Directory of the run, or its `release/` alone.
    ledger
        Check the certificate's origin with the ledger that the run was made with; takes no path.
    ledger_path
        Check it with this ledger.
    """
    out = make_output(output)
    checked = verify(run, ledger=ledger_path or ledger)
    found = checked.certificate
    lines = [f"{checked.files} files match the certificate"]
    if found.has_guarantee:
        target = found.content["guarantee"]["target_epsilon"]
        lines.append(
            f"epsilon recomputed: {checked.recomputed_epsilon:.6f} (target {target:g}),"
            f" delta {found.delta:g}, for each {found.content['guarantee']['unit']}"
        )
        lines += [found.grounds] if found.grounds else []
    else:
        lines.append("NO GUARANTEE: what was released is not differentially private")
    if checked.is_authenticated:
        lines.append("issued with this ledger's key, and the ledger knows it")
    out.result(
        os.linesep.join(lines),
        files=checked.files,
        has_guarantee=found.has_guarantee,
        recomputed_epsilon=checked.recomputed_epsilon,
        is_authenticated=checked.is_authenticated,
    )
