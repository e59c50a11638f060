"""Look for inputs that break a reader: `python -m tests.fuzz [--minutes 15] [READER...]`.

Guided by coverage where atheris is installed (libFuzzer), else blindly. Each reader is explored by
a process of its own, so that one that crashes the interpreter is a finding like any other. What
breaks a reader is written to its folder in corpus/, where `make test` tries it again; how long each
was tried, all times added up, to docs/results/fuzz.{json,md}.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
TRIED = Path(__file__).parents[2] / "docs" / "results" / "fuzz.json"
NEEDS = {"wire": "flwr"}
"""Readers that need a package which not every environment has."""
MOST_MEGABYTES = 2048
"""Of memory, all libraries included."""
SLOWEST = 60
"""Seconds after which a process is taken to hang, wherever it is."""


def main() -> int:
    """Explore readers one after the other; return whether any broke."""
    names = sorted(
        folder.name
        for folder in CORPUS.iterdir()
        if importlib.util.find_spec(NEEDS.get(folder.name, "sys"))
    )
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=15, help="in all (15)")
    parser.add_argument("--explore", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.readers) - set(names):
        parser.error(f"there is no reader {min(unknown)}; expected some of {', '.join(names)}")
    chosen = asked.readers or names
    if asked.explore:
        explore(chosen[0], asked.minutes * 60)
        return 0
    broken = [name for name in chosen if not _holds(name, asked.minutes * 60 / len(chosen))]
    print(f"{len(chosen)} readers tried, broken: {', '.join(broken) or 'none'}", flush=True)
    return bool(broken)


def _holds(name: str, seconds: float) -> bool:
    before, started = {path.name for path in (CORPUS / name).iterdir()}, time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "tests.fuzz", "--explore", f"--minutes={seconds / 60}"]
        try:
            code = subprocess.run(
                [*command, name], stdout=log, stderr=log, check=False, timeout=seconds + 2 * SLOWEST
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        log.seek(0)
        said = log.read().splitlines()
    found = sorted({path.name for path in (CORPUS / name).iterdir()} - before)
    note(name, time.monotonic() - started, said, found)
    if code == 0 and not found:
        print(f"{name}: {next((s for s in reversed(said) if s.startswith('Done')), 'Done')}")
        return True
    print("\n".join([*said[-25:], f"{name}: BROKEN, exit {code}: {', '.join(found)}"]), flush=True)
    return False


def note(name: str, seconds: float, said: list[str], found: list[str]) -> None:
    """Keep how long a reader was tried, and with how many inputs."""
    # Not at the top: what is imported before it is explored is not instrumented.
    from understudy.files import write_file
    from understudy.provenance import commit, device_name

    done = re.search(r"^Done (\d+) runs", "\n".join(said), re.MULTILINE)
    entry = {
        "reader": name,
        "minutes": round(seconds / 60, 1),
        "inputs": int(done[1]) if done else 0,
        "found": found,
        "is_guided": importlib.util.find_spec("atheris") is not None,
        "device": device_name(),
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    tried = json.loads(TRIED.read_bytes()) if TRIED.exists() else []
    tried.append(entry)
    write_file(TRIED, json.dumps(tried, indent=1).encode() + b"\n")
    write_file(TRIED.with_suffix(".md"), page(tried).encode())


def page(tried: list[dict[str, Any]]) -> str:
    """Add up what was noted, reader by reader."""
    lines = [
        "# Hostile input",
        "",
        "Written by `python -m tests.fuzz` (`make fuzz`): how long each reader was fed damaged "
        "files, all times added up, and how often one broke it. Findings are mended, and listed "
        "in [fuzzing.md](../fuzzing.md).",
        "",
        "| reader | minutes | inputs | broken by | guided by coverage | commits |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted({entry["reader"] for entry in tried}):
        all_of = [entry for entry in tried if entry["reader"] == name]
        minutes, inputs = (sum(entry[key] for entry in all_of) for key in ("minutes", "inputs"))
        broken = sum(len(entry["found"]) for entry in all_of)
        guided = "yes" if all(entry["is_guided"] for entry in all_of) else "in part"
        commits = ", ".join(dict.fromkeys(entry["commit"] for entry in all_of))
        lines.append(f"| {name} | {minutes:.1f} | {inputs} | {broken} | {guided} | {commits} |")
    return "\n".join([*lines, ""])


def explore(name: str, seconds: float) -> None:
    """Try damaged inputs for so long; libFuzzer ends this process when it is done."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: going on blindly")
        return wander(name, seconds)
    with atheris.instrument_imports(include=["understudy"]):
        from .readers import READERS
    reader = READERS[name]

    def damage(content: bytes, most: int, seed: int) -> bytes:
        by_format = seed % 4 > 0
        made = reader.mutate(content, Random(seed)) if by_format else atheris.Mutate(content, most)
        return made[:most]

    def check(content: bytes) -> None:
        with contextlib.redirect_stdout(None):
            reader.check(content)

    with tempfile.TemporaryDirectory() as growing:
        options = (
            f"-max_total_time={int(seconds)}", f"-rss_limit_mb={MOST_MEGABYTES}",
            f"-timeout={SLOWEST}", "-max_len=65536", "-print_final_stats=0", "-verbosity=1",
            f"-artifact_prefix={CORPUS / name}/found-",
        )  # fmt: skip
        arguments = [sys.argv[0], *options, growing, str(CORPUS / name)]
        atheris.Setup(arguments, check, custom_mutator=damage)
        atheris.Fuzz()
    return None


def wander(name: str, seconds: float) -> None:
    """Damage inputs of the corpus, and what was accepted of that, again and again."""
    from .readers import READERS

    reader, end, random = READERS[name], time.monotonic() + seconds, Random()
    kept = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    tried, places = 0, set()
    while time.monotonic() < end:
        content = reader.mutate(random.choice(kept), random)
        tried += 1
        try:
            with contextlib.redirect_stdout(None):
                if reader.check(content) and len(kept) < 1000:
                    kept.append(content)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            if (type(error), place.filename, place.lineno) not in places:  # each once
                places.add((type(error), place.filename, place.lineno))
                traceback.print_exc(limit=-6)
                digest = hashlib.sha256(content).hexdigest()[:12]
                (CORPUS / name / f"found-{digest}").write_bytes(content)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEGABYTES * 1024:
            (CORPUS / name / "found-memory").write_bytes(content)
            raise MemoryError(f"an input took over {MOST_MEGABYTES} MiB")
    print(f"Done {tried} runs")


if __name__ == "__main__":
    sys.exit(main())
