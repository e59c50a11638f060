"""Leave what a federation has made as a run leaves it: certified, in a folder to be shared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy import __version__
from understudy.card import About
from understudy.files import make_directory, storage_errors, sync_directory, write_file
from understudy.job import files_and_card
from understudy.nets.released import Artefact
from understudy.privacy import certificate as certificates
from understudy.privacy.certificate import Certificate
from understudy.privacy.federation import Course
from understudy.privacy.plan import PublicFacts
from understudy.runs import partial

CLIENT = "client"
"""The unit of a federation: all that one of them has."""


def facts_of(clients: int, shape: Sequence[int], classes: Sequence[str]) -> PublicFacts:
    """Return what is public of a federation's images: their form, and how many hold some."""
    channels, height, width = map(int, shape)
    return PublicFacts(
        units=clients, unit=CLIENT, class_names=tuple(classes), shape=(channels, height, width),
        mean=(0.5,) * channels, std=(0.5,) * channels,
    )  # fmt: skip


def release(
    made: Artefact,
    course: Course,
    out: Path,
    *,
    facts: PublicFacts,
    name: str,
    settings: Mapping[str, Any],
    seed: int = 0,
) -> Certificate:
    """Write OUT/release: what was made, its card, and the certificate of all of it.

    Args:
        made: what was made of the clients' answers.
        course: how the federation went.
        out: folder of the federation.
        facts: what is public of the images.
        name: of the method.
        settings: of the method.
        seed: of the method's public randomness.
    """
    about = About(
        name=course.data,
        method=name,
        facts=facts,
        epsilon=course.server_epsilon if course.is_private else None,
        delta=course.delta,
        grounds=course.in_words() if course.is_private else "",
    )
    files = files_and_card(about, made)
    certificate = certificates.attest(
        course,
        facts=facts,
        run_id=f"federation/{out.name}",
        method={
            "name": name,
            "settings": dict(settings),
            "preset": None,
            "preset_tuned_on": None,
            "seed": seed,
            "public_inputs": [],
            "understudy": __version__,
        },
        files=files,
    )
    files[certificates.FILE_NAME] = certificate.to_bytes()
    _place(files, out / "release")
    return certificate


def _place(files: Mapping[str, bytes], folder: Path) -> None:
    """Write a folder that is there with all its files, or not at all."""
    working = partial(folder)
    shutil.rmtree(working, ignore_errors=True)  # one that was cut short
    make_directory(working)
    for name, content in files.items():
        write_file(working / name, content)
    with storage_errors(folder):
        os.rename(working, folder)
        sync_directory(folder.parent)
