"""Export: a released set in the form that someone else's tools read. Only `release/` is needed.

Whatever is derived from a released set is post-processing: the guarantee goes with it.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from understudy.card import About, data_card
from understudy.errors import InvalidSettings, OutputExists, installing
from understudy.files import make_directory, storage_errors, sync_directory, write_file
from understudy.privacy import certificate as certificates
from understudy.privacy.certificate import Certificate
from understudy.runs import SET_FILE
from understudy.synthetic import IMAGES_ARE, SOFT_LABELS_ARE, SyntheticSet

Format = Literal["png", "npz", "safetensors", "parquet", "idx"]
Files = Iterator[tuple[str, bytes]]
UNLABELLED = "unlabelled"
LONGEST_FOLDER = 180
"""Bytes in the name of a folder; file systems take 255."""
BESIDE = ("README.md", certificates.FILE_NAME)
"""What lies beside the folders of classes."""
EXPORTING = ".exporting"
HARD_ALONE = "; of the soft labels, each image's likeliest class"


@dataclass(frozen=True)
class _Form:
    """A format: how to write it, what each file is, what a data hub must know."""

    write: Callable[[SyntheticSet], Files]
    files: dict[str, str]
    header: tuple[str, ...] = ()
    soft: str = ""
    """How it holds soft labels, if it can."""

    def describe(self, synthetic: SyntheticSet) -> dict[str, str]:
        """Say what each file is; that of the set itself has more than one form."""
        of_set = {SET_FILE: synthetic.described} if SET_FILE in self.files else {}
        files = self.files | of_set
        if synthetic.soft_labels is None or of_set:
            return files
        soft = f"; {self.soft}" if self.soft else HARD_ALONE
        return {name: what + soft for name, what in files.items()}


def export_release(
    release: Path, to: Format, directory: Path, *, without_guarantee: bool = False
) -> int:
    """Write the set of `release` to `directory`, complete or not at all; return its images.

    The release is verified first: what does not match its certificate is not passed on.
    """
    if to not in FORMS:
        raise InvalidSettings(f"there is no format '{to}'; expected one of {', '.join(FORMS)}")
    if directory.exists():
        raise OutputExists(f"{directory} exists already; choose another --out, or remove it")
    certificate = verified(release, without_guarantee=without_guarantee)
    synthetic = SyntheticSet.load(release / SET_FILE)
    working = directory.with_name(f"{directory.name}{EXPORTING}")
    _clear(working)  # an export cut short
    try:
        _write(working, synthetic, certificate, FORMS[to])
        with storage_errors(directory):
            os.rename(working, directory)
            sync_directory(directory.parent)
    except BaseException:
        _clear(working)
        raise
    return len(synthetic)


def _clear(working: Path) -> None:
    """Remove what may be there; of a link only itself, never what it leads to."""
    if working.is_symlink():
        working.unlink()
    shutil.rmtree(working, ignore_errors=True)


def verified(release: Path, *, without_guarantee: bool) -> Certificate:
    """Check that a release may be passed on; return its certificate."""
    certificate = certificates.verify(release).certificate
    if not certificate.has_guarantee and not without_guarantee:
        raise InvalidSettings(
            f"{release} has no guarantee: it was made without noise and shows private data; pass "
            "--without-guarantee to use it all the same"
        )
    return certificate


def _write(directory: Path, synthetic: SyntheticSet, certificate: Certificate, form: _Form) -> None:
    make_directory(directory)
    for name, content in form.write(synthetic):
        if not (directory / name).parent.exists():
            make_directory((directory / name).parent)
        write_file(directory / name, content)
    described = form.describe(synthetic) | {
        certificates.FILE_NAME: f"what is guaranteed of the set that this was exported from, by "
        f"the SHA-256 of its `{SET_FILE}`; `understudy verify` checks the `release/` that holds "
        "it, not this folder",
    }
    card = data_card(About.certified(certificate), synthetic, described, header=form.header)
    write_file(directory / "README.md", card.encode())
    write_file(directory / certificates.FILE_NAME, certificate.to_bytes())


def _bytes(synthetic: SyntheticSet) -> NDArray[np.uint8]:
    """Return images as (n, h, w, c) with 8 bits."""
    pixels = (synthetic.images.clamp(0, 1) * 255).round().byte()
    return np.asarray(pixels.permute(0, 2, 3, 1).contiguous().cpu())


def _encoded(images: NDArray[np.uint8]) -> Iterator[bytes]:
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(buffer, format="PNG")
        yield buffer.getvalue()


def folder_names(class_names: Sequence[str]) -> list[str]:
    """Return one folder name per class, whose sorted order is the order of the labels.

    >>> folder_names(["cat", "dog"]), folder_names(["T-shirt/top", "Bag"])
    (['cat', 'dog'], ['0_T-shirt_top', '1_Bag'])
    """
    plain = [re.sub(r"[^\w .-]", "_", name).strip(" .") or "_" for name in class_names]
    plain = [name.encode()[:LONGEST_FOLDER].decode(errors="ignore") for name in plain]
    taken = {unicodedata.normalize("NFC", name).lower() for name in (*BESIDE, *plain)}
    if len(taken) == len(BESIDE) + len(plain) and plain == sorted(plain):
        return plain
    digits = len(str(len(plain) - 1))
    return [f"{number:0{digits}}_{name}" for number, name in enumerate(plain)]


def _png(synthetic: SyntheticSet) -> Files:
    folders = folder_names(synthetic.class_names)
    labels = synthetic.labels.tolist()
    for number, content in enumerate(_encoded(_bytes(synthetic))):
        folder = folders[labels[number]] if labels[number] >= 0 else UNLABELLED
        yield f"{folder}/{number:06}.png", content


def _npz(synthetic: SyntheticSet) -> Files:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {
        "images": np.asarray(synthetic.images),
        "labels": np.asarray(synthetic.labels),
        "classes": np.array(synthetic.class_names),
    }
    if synthetic.soft_labels is not None:
        arrays["soft_labels"] = np.asarray(synthetic.soft_labels)
    np.savez_compressed(buffer, **arrays)
    yield "synthetic.npz", buffer.getvalue()


def _safetensors(synthetic: SyntheticSet) -> Files:
    yield SET_FILE, synthetic.to_bytes()


def _idx(synthetic: SyntheticSet) -> Files:
    if len(synthetic.class_names) > 256:
        raise InvalidSettings("an IDX file holds labels up to 255; choose another format")
    if not synthetic.is_labelled:
        raise InvalidSettings("the set has no labels, which IDX needs; choose another format")
    images = _bytes(synthetic)
    images = images[..., 0] if images.shape[3] == 1 else images
    for name, array in (("images", images), ("labels", np.asarray(synthetic.labels, np.uint8))):
        magic = struct.pack(">I", 0x800 + array.ndim)
        lengths = struct.pack(f">{array.ndim}I", *array.shape)
        yield f"train-{name}-idx{array.ndim}-ubyte", magic + lengths + array.tobytes()


def _parquet(synthetic: SyntheticSet) -> Files:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise InvalidSettings(f"writing parquet needs pyarrow; {installing('parquet')}") from None
    images: list[dict[str, Any]] = [
        {"bytes": content, "path": f"{number:06}.png"}
        for number, content in enumerate(_encoded(_bytes(synthetic)))
    ]
    features: dict[str, Any] = {
        "image": {"_type": "Image"},
        "label": {"names": list(synthetic.class_names), "_type": "ClassLabel"},
    }
    types = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()}
    columns: dict[str, Any] = {"image": images, "label": synthetic.labels.tolist()}
    if synthetic.soft_labels is not None:
        number = {"dtype": "float32", "_type": "Value"}
        features["soft_labels"] = {"feature": number, "_type": "Sequence"}
        types["soft_labels"] = pa.list_(pa.float32())
        columns["soft_labels"] = synthetic.soft_labels.tolist()
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table(columns, schema=pa.schema(types, metadata=about))
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    yield "data/train-00000-of-00001.parquet", sink.getvalue()


FORMS = {
    "png": _Form(
        _png,
        {"<class>/<number>.png": "the images, one folder per class, in the order of the labels"},
    ),
    "npz": _Form(
        _npz,
        {"synthetic.npz": f"{IMAGES_ARE}, `labels`, `classes`"},
        soft=SOFT_LABELS_ARE,
    ),
    "safetensors": _Form(
        _safetensors,
        {SET_FILE: "the set as it was released"},
    ),
    "parquet": _Form(
        _parquet,
        {"data/train-00000-of-00001.parquet": 'columns `image` and `label`; opens with '
         '`datasets.load_dataset("<this folder>")`'},
        (
            "configs:",
            "- config_name: default",
            "  data_files:",
            "  - split: train",
            "    path: data/train-*.parquet",
        ),
        "column `soft_labels`: a list of probabilities of the classes",
    ),
    "idx": _Form(
        _idx,
        {
            "train-images-idx?-ubyte": "the images, as bytes; n x h x w, or n x h x w x 3",
            "train-labels-idx1-ubyte": "their labels",
        },
    ),
}  # fmt: skip
