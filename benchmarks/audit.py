"""Audits of every release and every method, written to docs/results/audit.{json,md}.

With names, makes those rows again and leaves the others. Run it on a clean checkout: each row
records the commit that made it.

    .venv/bin/python benchmarks/audit.py [gradient psg ...]        # or: make audit
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

from common import RESULTS, commit, device_name
from understudy.audit.bounds import SIGNIFICANCE
from understudy.audit.finding import Finding
from understudy.audit.mechanisms import PROBES
from understudy.audit.table import ALL, audits_of, markdown
from understudy.methods import METHODS
from understudy.training.engine import choose_device

ROWS = RESULTS / "audit.json"
ORDER = [*PROBES, *METHODS]
STAMPS = ("commit", "device", "date")


def finding(row: dict) -> Finding:
    fields = {key: value for key, value in row.items() if key not in (*STAMPS, "verdict")}
    return Finding(**fields)


def page(rows: list[dict]) -> str:
    said = {name: ", ".join(dict.fromkeys(row[name] for row in rows)) for name in STAMPS}
    return "\n".join(
        [
            "# Audits",
            "",
            "Written by `benchmarks/audit.py` (`make audit`); what the columns mean: "
            "[audits.md](../audits.md). Lower bounds on epsilon, each with "
            f"{100 * (1 - SIGNIFICANCE):g} % confidence, against the claim at delta 1e-5. "
            f"{said['device']}, {sum(row['seconds'] for row in rows):.0f} seconds in all, commit "
            f"{said['commit']}, {said['date']}.",
            "",
            *markdown([finding(row) for row in rows]),
            "",
        ]
    )


def main() -> None:
    names = sys.argv[1:] or [ALL]
    rows = json.loads(ROWS.read_text()) if ROWS.exists() and names != [ALL] else []
    stamp = dict(
        zip(STAMPS, (commit(), device_name(), datetime.now(UTC).date().isoformat()), strict=True)
    )
    has_fault = False
    for name in names:
        for found in audits_of(name, device=choose_device("auto")):
            key = (found.subject, found.attack)
            rows = [row for row in rows if (row["subject"], row["attack"]) != key]
            rows.append(found.to_json() | stamp)
            rows.sort(key=lambda row: ORDER.index(row["subject"].removesuffix(", a whole run")))
            ROWS.write_text(json.dumps(rows, indent=1) + "\n")
            ROWS.with_suffix(".md").write_text(page(rows))
            has_fault |= found.is_violation
            print(f"{found.subject}, {found.attack}: {found.bound:.2f} of {found.claimed:.2f}, "
                  f"{found.verdict}, {found.seconds:.0f} s", flush=True)  # fmt: skip
    sys.exit(has_fault)


if __name__ == "__main__":
    main()
