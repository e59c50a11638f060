"""`understudy audit`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.audit.finding import Finding
from understudy.audit.released import audit_run
from understudy.audit.table import ALL, BRIEF, audits_of, brief
from understudy.cli.output import JsonOutput, Output, OutputOptions, make_output
from understudy.cli.settings import MachineOptions
from understudy.errors import VerificationFailed
from understudy.training.engine import choose_device


def command(
    what: str = ALL,
    *,
    data: str | None = None,
    test: str | None = None,
    ledger: Path | None = None,
    machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Attack what should be private, and say how much epsilon the attack shows at least.

    Releases and methods are audited on built-in data with canaries, at no cost. A run is audited by
    what it released alone, against its training records: the result is private, and goes to its
    `private/`. A bound above the claim is a fault, and the exit code is then 5; one below it proves
    nothing.

    Parameters
    ----------
    what
        A release, a method, the directory of a run, or all releases and methods.
    data
        The records that the run was made from; by default read from where they were.
    test
        Unseen records; by default the set's own test split, or else its registered hold-out.
    ledger
        The ledger; by default the one that the run was made with.
    """
    out, asked = make_output(output), machine or MachineOptions()
    is_run = Path(what).is_dir()
    if is_run:
        found: Iterable[Finding] = audit_run(
            what, data=data, test=test, ledger=ledger, device=asked.device, progress=out
        )
    else:
        found = audits_of(what, device=choose_device(asked.device), progress=out)
    findings = list(found)
    _show(out, findings, is_one=what != ALL)
    if is_run:
        out.result("these numbers are private")
    if faulty := [one.subject for one in findings if one.is_violation]:
        raise VerificationFailed(
            f"the audit shows more than is claimed of {', '.join(faulty)}, twice where it could be "
            "repeated; do not release anything before this is explained"
        )


def _show(out: Output, findings: list[Finding], *, is_one: bool) -> None:
    if isinstance(out, JsonOutput):
        for one in findings:
            out.result("", **one.to_json())
        return
    out.table("Lower bounds on epsilon", BRIEF, [brief(one) for one in findings])
    if is_one:
        rows = [
            (one.attack, name, f"{value:.4g}")
            for one in findings
            for name, value in ((one.how, one.bound), *one.further.items(), *one.tests.items())
        ]
        out.table("Bounds, and probabilities of tests", ("attack", "what", "value"), rows)
