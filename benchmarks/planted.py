"""Known privacy errors, planted one by one: is each caught, and do the tests pass without them?

Runs every test that should catch an error twenty times as it is, and once with each of its errors;
writes docs/results/planted.{json,md}.

    python benchmarks/planted.py [--clean 20]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, commit, device_name

sys.path.insert(0, str(ROOT / "tests" / "planted"))

from planted_errors import ERRORS
from planting import run_apart


def measured(clean: int) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        alone, planted = run_apart(Path(folder) / "found.json", clean=clean)
    rows = []
    for error in ERRORS:
        found = planted[error.name]
        rows.append(
            {
                "error": error.name,
                "planted_in": error.at.replace(":", "."),
                "test": error.caught_by,
                "clean_passes": sum(not one.phase for one in alone[error.caught_by]),
                "clean_runs": len(alone[error.caught_by]),
                "is_caught": error.is_caught(found),
                "raised": found.raised,
                "statement": found.statement.splitlines()[0] if found.statement else found.message,
                "false_alarm": error.false_alarm,
            }
        )
    seconds = round(time.perf_counter() - started, 1)
    return {"device": device_name(), "commit": commit(), "seconds": seconds, "errors": rows}


def table(found: dict[str, Any]) -> str:
    rows = found["errors"]
    lines = [
        "# Planted errors",
        "",
        f"Written by `benchmarks/planted.py` (`make planted`). {len(rows)} errors, planted one by "
        f"one; {sum(row['is_caught'] for row in rows)} caught. Commit {found['commit']}, "
        f"{found['device']}, {found['seconds']:g} seconds. A false alarm is a failure without the "
        "error: the probability is at most what the table says, and 0 where nothing is random.",
        "",
        "| error | caught by | passes without it | fails with it | where it fails | false alarm |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        test = row["test"].partition("::")[2]
        raised = row["raised"] if row["is_caught"] else f"NOT CAUGHT ({row['raised'] or 'passed'})"
        statement = row["statement"].replace("|", "\\|")
        passes = f"{row['clean_passes']} of {row['clean_runs']}"
        lines.append(
            f"| {row['error']} | `{test}` | {passes} | {raised} | `{statement}` "
            f"| {row['false_alarm']:g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=20)
    found = measured(parser.parse_args().clean)
    path = RESULTS / "planted.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found))
    print(table(found))
    rows = found["errors"]
    is_whole = all(row["is_caught"] and row["clean_passes"] == row["clean_runs"] for row in rows)
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
