"""Verbs for public images: pretrain an encoder, or a GAN, that private methods start from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.data.images import LabelledImages
from understudy.errors import InvalidData, InvalidSettings, OutputExists, StorageError
from understudy.files import make_directory, write_file
from understudy.finished import opened
from understudy.pipeline import Data, load_data
from understudy.privacy import registration as registrations
from understudy.privacy.ledger import Ledger, default_ledger
from understudy.privacy.mark import mark_beside
from understudy.progress import Progress
from understudy.training.engine import Engine, choose_device
from understudy.training.gan_pretraining import GANHeader, GANPretraining, train_gan
from understudy.training.pretrained import ENDING, EncoderHeader
from understudy.training.pretraining import Pretraining, train_encoder


@dataclass(frozen=True)
class Pretrained:
    """A pre-trained encoder."""

    path: Path
    header: EncoderHeader


def pretrain(
    data: Data,
    *,
    out: str | Path,
    public: bool = False,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **training: Any,
) -> Pretrained:
    """Train an encoder on PUBLIC labelled images: nothing protects them here.

    Args:
        data: name of a known set, path, or `LabelledImages`.
        out: file to write, `.safetensors`; `load_encoder` and methods that use an encoder read it.
        public: declare that the set is public; needed unless it is a known one, verified.
        ledger: path of the ledger that knows what is private; by default the user's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **training: fields of `Pretraining`: `epochs`, `lr`, `width`, `weight_decay`, `augment`,
            `seed`.

    >>> import tempfile, understudy
    >>> file = f"{tempfile.mkdtemp()}/digits.safetensors"
    >>> understudy.pretrain("digits", out=file, epochs=1, width=4).header.trained_on
    'digits'
    """
    how = Pretraining(**training)
    path, images, engine, report = _public_work(
        data, out, public=public, ledger=ledger, device=device, compile=compile, progress=progress
    )
    params, header = train_encoder(images, how, engine=engine, progress=report)
    write_file(path, header.to_file(params))
    return Pretrained(path, header)


def pretrain_gan(
    data: Data,
    *,
    out: str | Path,
    public: bool = False,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **training: Any,
) -> tuple[Path, GANHeader]:
    """Train a generator and a discriminator on PUBLIC images, for `dp-gan` to start from.

    Args:
        data: name of a known set, path, or `LabelledImages`.
        out: file to write, `.safetensors`.
        public: declare that the set is public; needed unless it is a known one, verified.
        ledger: path of the ledger that knows what is private; by default the user's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **training: fields of `GANPretraining`, such as `steps`, `width`, `labelled`, `seed`.

    >>> import tempfile, understudy
    >>> file = f"{tempfile.mkdtemp()}/digits.safetensors"
    >>> path, header = understudy.pretrain_gan("digits", out=file, steps=1, width=2, critic_width=2)
    >>> header.trained_on
    'digits'
    """
    how = GANPretraining(**training)
    path, images, engine, report = _public_work(
        data, out, public=public, ledger=ledger, device=device, compile=compile, progress=progress
    )
    made = train_gan(images, how, engine=engine, progress=report)
    write_file(path, made.to_bytes())
    return path, made.header


def _public_work(
    data: Data,
    out: str | Path,
    *,
    public: bool,
    ledger: Ledger | str | Path | None,
    device: str,
    compile: bool,
    progress: Progress | None,
) -> tuple[Path, LabelledImages, Engine, Progress]:
    """Check what is to be trained on public images and where it goes: before an hour of training.

    Returns:
        The file to write, the images, where to compute, and where to report.
    """
    path, report = Path(out), progress or Progress()
    if path.suffix != ENDING:
        raise InvalidSettings(f"the output is called {path.name}, expected a name in {ENDING}")
    if path.exists():
        raise OutputExists(f"{path} exists already; choose another --out, or remove it")
    images = data if isinstance(data, LabelledImages) else load_data(data, progress=report)
    _check_public(images, ledger, is_declared=public)
    report.say(f"{images.name} is treated as PUBLIC: nothing protects its images")
    if not path.parent.exists():
        make_directory(path.parent)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise StorageError(f"{path.parent} is no folder that can be written; choose another --out")
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    return path, images, engine, report


def _check_public(
    data: LabelledImages, ledger: Ledger | str | Path | None, *, is_declared: bool
) -> None:
    if not data.is_public_benchmark and not is_declared:
        raise InvalidData(
            f"{data.name} is not a known public set; pre-training protects nothing of it; if "
            "everyone may see its images, say so with --public"
        )
    own = default_ledger()
    if ledger is None and not (own.exists() or own.is_symlink() or mark_beside(own)):
        return  # nothing was ever registered
    with opened(ledger, create=False) as book:
        for part in (data, data.test):
            if part is not None:
                registrations.refuse_private(book, part)
