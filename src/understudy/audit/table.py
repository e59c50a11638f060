"""All audits, as one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from understudy.audit.finding import Finding
from understudy.audit.mechanisms import PROBES, audit_release
from understudy.audit.methods import CPU, Setup, audit_images, audit_method
from understudy.errors import InvalidSettings
from understudy.methods import METHODS
from understudy.progress import Progress

Audit = Callable[[], list[Finding]]
ALL = "all"
WHOLE = "psg"
"""The method that is also audited with a run of its usual length, and by its images."""
BRIEF = ("subject", "claimed", "lower bound", "best bound", "verdict")
COLUMNS = ("subject", "attack", "claimed", "lower bound", "how", "best other", "tests", "verdict")


def audits_of(
    name: str = ALL, *, device: torch.device = CPU, progress: Progress | None = None
) -> Iterator[Finding]:
    """Audit a release or a method by its name, or all of them; yield findings as they come.

    What looks like a violation is audited once more with new noise, and called one only if that
    looks like one too: by chance alone that happens to at most one in 400.
    """
    report = progress or Progress()
    for what, audit in _chosen(name, device).items():
        report.say(f"auditing {what}")
        found = audit()
        if any(one.is_violation for one in found):
            report.say(f"{what} looks like a violation; auditing it again")
            found = [
                min(pair, key=lambda one: one.is_violation)
                for pair in zip(found, audit(), strict=True)
            ]
        yield from found


def _chosen(name: str, device: torch.device) -> dict[str, Audit]:
    releases = [one for one in PROBES if name in (ALL, one, PROBES[one].kind)]
    methods = [one for one in METHODS if name in (ALL, one)]
    if not releases and not methods:
        kinds = dict.fromkeys(probe.kind for probe in PROBES.values())
        raise InvalidSettings(
            f"there is nothing called '{name}' to audit, expected all, the directory of a run, "
            f"a release ({', '.join(kinds)}) or a method ({', '.join(METHODS)})"
        )
    small, whole = Setup(device=device), Setup(device=device, is_small=False)
    chosen: dict[str, Audit] = {f"release {one}": partial(_release, one) for one in releases}
    chosen |= {f"method {one}": partial(_method, one, small) for one in methods}
    if WHOLE in methods:
        chosen[f"method {WHOLE}, a whole run"] = partial(_method, WHOLE, whole)
        chosen[f"method {WHOLE}, by its images"] = partial(audit_images, WHOLE, small)
    return chosen


def _release(name: str) -> list[Finding]:
    return [audit_release(name)]


def _method(name: str, setup: Setup) -> list[Finding]:
    found = audit_method(name, setup)
    return [found if setup.is_small else replace(found, subject=f"{name}, a whole run")]


def row_of(found: Finding) -> tuple[str, ...]:
    """Write a finding as the cells of a row."""
    best = max(found.further.items(), key=lambda one: one[1], default=None)
    worst = min(found.tests.items(), key=lambda one: one[1], default=None)
    return (
        found.subject,
        found.attack,
        f"{found.claimed:.2f}",
        f"{found.bound:.2f}",
        f"{found.how}, {found.repetitions}",
        f"{best[1]:.2f} ({best[0]})" if best else "",
        f"{len(found.tests)}, least p {worst[1]:.2g}" if worst else "",
        found.verdict,
    )


def brief(found: Finding) -> tuple[str, ...]:
    """Write a finding as the cells of a row that fits a terminal."""
    best = max(found.bound, *found.further.values(), 0.0)
    name = f"{found.subject}: {found.attack}"
    return name, f"{found.claimed:.2f}", f"{found.bound:.2f}", f"{best:.2f}", found.verdict


def markdown(findings: Sequence[Finding]) -> list[str]:
    """Write findings as the lines of a table."""
    rows = (COLUMNS, ("---",) * len(COLUMNS), *(row_of(one) for one in findings))
    return ["| " + " | ".join(row) + " |" for row in rows]
