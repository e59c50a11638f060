"""Licences of what is installed with understudy, as its packages state them: `make licences`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

PERMISSIVE = frozenset((
    "0bsd", "apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc0-1.0", "hpnd",
    "isc", "llvm-exception", "mit", "mit-0", "mit-cmu", "psf-2.0", "unlicense", "zlib",
))  # fmt: skip
WEAK = PERMISSIVE | {"mpl-2.0"}
"""Also: changes to its own files stay open. For what only tests need."""
WRITTEN = {
    "apache 2.0": "apache-2.0", "apache software license": "apache-2.0", "mit license": "mit",
    "apache license 2.0": "apache-2.0", "apache license, version 2.0": "apache-2.0",
    "bsd license": "bsd", "bsd 2-clause license": "bsd-2-clause", "isc license (iscl)": "isc",
    "mozilla public license 2.0 (mpl 2.0)": "mpl-2.0", "new bsd": "bsd-3-clause",
    "python software foundation license": "psf-2.0", "3-clause bsd license": "bsd-3-clause",
    "the unlicense (unlicense)": "unlicense",
}  # fmt: skip
"""What packages call licences that have a short name."""
KNOWN = {"axe-playwright-python": "MIT"}
"""Packages that state none, by the text of the licence that they bring."""
PROPRIETARY = re.compile(r"nvidia-.+|cuda-.+")
"""What torch's builds for NVIDIA GPUs bring along: may be used, is not ours to pass on."""


def closure(extras: frozenset[str]) -> dict[str, Distribution]:
    """Return what understudy needs, with what that needs in turn, as far as it is installed."""
    found: dict[str, Distribution] = {}
    waiting = [("understudy", extras)]
    while waiting:
        name, wanted = waiting.pop()
        if name in found and not wanted:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another system
            continue
        waiting += _needs(found[name], wanted, found)
    return found


def _needs(
    of: Distribution, extras: frozenset[str], found: dict[str, Distribution]
) -> Iterator[tuple[str, frozenset[str]]]:
    for line in of.requires or ():
        needed = Requirement(line)
        chosen = [{"extra": extra} for extra in (*extras, "")]
        if needed.marker and not any(needed.marker.evaluate(one) for one in chosen):
            continue
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        if name not in found:
            yield name, frozenset(needed.extras)


def stated(package: Distribution) -> frozenset[str]:
    """Return the licences that a package states, by their short names."""
    about = package.metadata
    name = re.sub(r"[-_.]+", "-", about["Name"]).lower()
    text = KNOWN.get(name) or about.get("License-Expression") or about.get("License") or ""
    named = re.split(r"\b(?:AND|OR|WITH)\b", text.replace("(", "").replace(")", ""))
    if not text or len(text) > 100:  # the licence itself, not its name
        lines = about.get_all("Classifier", [])
        named = [line.split("::")[-1] for line in lines if line.startswith("License ::")]
    names = [word.strip().lower() for word in named if word.strip()]
    return frozenset(WRITTEN.get(word, word) for word in names)


def not_allowed(extras: frozenset[str], allowed: frozenset[str]) -> dict[str, str]:
    """Return packages with another licence than an allowed one, or none."""
    return {
        name: ", ".join(sorted(stated(package))) or "states none"
        for name, package in closure(extras).items()
        if not PROPRIETARY.fullmatch(name) and not (stated(package) and stated(package) <= allowed)
    }


if __name__ == "__main__":
    for name, package in sorted(closure(frozenset({"dev"})).items()):
        print(f"{name} {package.version}: {', '.join(sorted(stated(package))) or 'states none'}")
