"""Trained networks as they are released: a generator draws images, a classifier names them.

Whatever they are used for is post-processing: the guarantee of the run that trained them goes with
it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from understudy.errors import InvalidData, InvalidSettings
from understudy.files import parse_json, read_whole
from understudy.nets.classifiers import NETWORKS, ModuleNetwork, classifier
from understudy.nets.diffusion import DiffusionGenerator
from understudy.nets.gallery import GalleryGenerator
from understudy.nets.generators import GENERATORS, GeneratorNetwork
from understudy.nets.modules import Shape, skeleton
from understudy.nets.params import Network, Params, parameter_count, per_channel
from understudy.nets.rehearsed import RehearsedGenerator
from understudy.seeds import public_generator
from understudy.synthetic import UNREADABLE, SyntheticSet, from_whole_bytes, metadata
from understudy.text import is_name

FORMAT = 1
CHUNK = 250
"""Images that are drawn at once."""
NAMED_AT_ONCE = 1000
"""Images that are classified at once."""
SUM_TOLERANCE = 1e-6
"""How far shares of classes may be from adding up to 1."""

Released = TypeVar("Released")
DRAWING: dict[str, type[GeneratorNetwork]] = {
    **GENERATORS,
    "diffusion": DiffusionGenerator,
    "gallery": GalleryGenerator,
    "rehearsed": RehearsedGenerator,
}
"""Name -> network that images can be drawn from; the names stand in files."""


@dataclass(frozen=True, eq=False)
class Generator:
    """A generator with all that drawing from it needs."""

    network: GeneratorNetwork
    params: Params
    statistics: Params
    """Means and variances of its norms."""
    shares: tuple[float, ...] | None = None
    """How much of a drawn set each class is; None for equal parts."""
    grain: float = 0.0
    """Standard deviation of the noise on each pixel of what is drawn."""

    def __post_init__(self) -> None:
        if not 0 <= self.grain < math.inf:
            raise InvalidData(f"a generator's grain is {self.grain:g}, expected 0 or more")
        if self.shares is None:
            return
        if len(self.shares) != self.network.classes:
            raise InvalidData(
                f"a generator of {self.network.classes} classes has shares of {len(self.shares)}, "
                "expected one for each class"
            )
        if not (
            min(self.shares, default=0) >= 0 and abs(math.fsum(self.shares) - 1) < SUM_TOLERANCE
        ):
            raise InvalidData(
                "shares of classes are negative, not numbers, or do not add up to 1; expected "
                "probabilities"
            )

    @torch.no_grad()
    def sample(
        self, count: int | None = None, *, seed: int, per_class: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw images (n, c, h, w), whole bytes from 0 black to 1 white, and labels (n,) in order.

        The same arguments give the same set on the same device. Labels are -1 without classes.
        Pixels beyond black and white become black and white.

        Args:
            count: how many images in all; classes get their shares, rounded to add up.
            seed: public.
            per_class: how many of each class instead.
        """
        device = next(iter(self.params.values())).device
        labels, grains = self._labels(count, per_class), public_generator(seed, "grain")
        drawn = []
        parts = zip(
            codes_of(self.network, len(labels), seed), torch.split(labels, CHUNK), strict=True
        )
        for codes, chosen in parts:
            images = self.network(
                self.params, codes.to(device), chosen.to(device), statistics=self.statistics
            )
            if self.grain:
                noise = torch.randn(images.shape, generator=grains).to(device)
                images = images + self.grain * noise
            drawn.append((images.clamp(0, 1) * 255).round().byte().cpu())
        return from_whole_bytes(torch.cat(drawn)), labels

    @torch.no_grad()
    def drawn(
        self,
        class_names: tuple[str, ...],
        count: int | None = None,
        *,
        seed: int,
        per_class: int | None = None,
    ) -> SyntheticSet:
        """Draw a set. Where the network has opinions on images, these label it, softly and hard.

        Args:
            class_names: of the classes.
            count: how many images in all, or
            seed: public.
            per_class: how many of each class that images are drawn as.
        """
        images, labels = self.sample(count, seed=seed, per_class=per_class)
        soft = self._opinions(images)
        if soft is not None:
            labels = soft.argmax(1)
        return SyntheticSet(images, labels, class_names, soft, generator=self)

    def _opinions(self, images: Tensor) -> Tensor | None:
        device, found = next(iter(self.params.values())).device, []
        for part in torch.split(images, NAMED_AT_ONCE):
            said = self.network.opinions(self.params, part.to(device))
            if said is None:
                return None
            found.append(said.cpu())
        return torch.cat(found)

    def _labels(self, count: int | None, per_class: int | None) -> Tensor:
        classes = self.network.classes
        if (count is None) == (per_class is None):
            raise InvalidSettings(
                "expected a number of images in all (--count), or of each class (--per-class), "
                "and not both"
            )
        wanted = per_class if count is None else count
        if wanted is None or wanted < 1:
            raise InvalidSettings(f"{wanted} images were asked for, expected 1 or more")
        if classes == 0 and count is None:
            raise InvalidSettings("the generator knows no classes; pass --count instead")
        if classes == 0:
            return torch.full((wanted,), -1)
        shares = self.shares or [1 / classes] * classes
        counts = [wanted] * classes if count is None else divided(wanted, shares)
        return torch.arange(classes).repeat_interleave(torch.tensor(counts))

    def to(self, device: torch.device) -> Generator:
        """Bring it to `device`."""
        params, statistics = (
            {name: values.to(device) for name, values in group.items()}
            for group in (self.params, self.statistics)
        )
        return replace(self, params=params, statistics=statistics)

    def to_bytes(self) -> bytes:
        """Serialise as safetensors; the network's description stands in the header."""
        name = next(n for n, kind in DRAWING.items() if type(self.network) is kind)
        about = {
            "format": FORMAT,
            "network": name,
            "config": asdict(self.network),
            "shares": self.shares,
            "grain": self.grain,
        }
        tensors = {
            f"{group}/{name}": values.detach().cpu().contiguous()
            for group in ("params", "statistics")
            for name, values in getattr(self, group).items()
        }
        return save_tensors(tensors, metadata={"generator": json.dumps(about)})

    @classmethod
    def from_bytes(cls, content: bytes) -> Generator:
        """Read what `to_bytes` wrote."""
        with _reading("generator"):
            about, tensors = _parts("generator", content)
            network = _network(about)
            groups: dict[str, Params] = {"params": {}, "statistics": {}}
            for name, values in tensors.items():
                group, _, part = name.partition("/")
                groups[group][part] = values
            _check(network, groups)
            shares, grain = _value(about["shares"]), about.get("grain", 0.0)
            return cls(network, **groups, shares=shares, grain=grain)

    @classmethod
    def load(cls, path: Path) -> Generator:
        """Read a file of what `to_bytes` wrote."""
        return _loaded(cls.from_bytes, path)


@dataclass(frozen=True, eq=False, kw_only=True)
class Classifier:
    """A classifier with all that using it needs."""

    name: str
    """Of its network, one of `NETWORKS`."""
    shape: Shape
    """Of an image: channels, height, width."""
    width: int
    """Of the ConvNet; the others have theirs."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """What is taken from the pixels of each channel, before they are divided by `std`."""
    std: tuple[float, ...]
    params: Params

    def __post_init__(self) -> None:
        if self.name not in NETWORKS:
            raise InvalidData(
                f"the classifier's network is '{self.name}', this version of understudy has "
                f"{', '.join(NETWORKS)}; use a newer version"
            )
        channels = self.shape[0]
        if not (len(self.mean) == len(self.std) == channels and min(self.std) > 0):
            raise InvalidData(
                f"a classifier has mean {self.mean} and std {self.std}, expected one for each of "
                f"{channels} channels, and a positive std"
            )

    @property
    def network(self) -> Network:
        """The network, without parameters."""
        return classifier(self.name, self.shape, len(self.class_names), width=self.width)

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """Return what it thinks of images (n, c, h, w): a probability for each class (n, classes).

        Pixels are 0 for black and 1 for white, or bytes.
        """
        if images.shape[1:] != self.shape:
            raise InvalidData(
                f"images have shape {tuple(images.shape)}, expected (n, "
                f"{', '.join(map(str, self.shape))}), as the classifier was trained on"
            )
        device, network = next(iter(self.params.values())).device, self.network
        found = [torch.empty((0, len(self.class_names)))]
        for part in torch.split(images, NAMED_AT_ONCE) if len(images) else ():
            pixels = part.to(device)
            pixels = from_whole_bytes(pixels) if pixels.dtype == torch.uint8 else pixels.float()
            seen = (pixels - per_channel(self.mean, pixels)) / per_channel(self.std, pixels)
            found.append(network(self.params, seen).softmax(1).cpu())
        return torch.cat(found)

    def predict(self, images: Tensor, *, among: Sequence[str] | None = None) -> Tensor:
        """Return the labels (n,) of images (n, c, h, w), places in `class_names`.

        Args:
            images: pixels are 0 for black and 1 for white, or bytes.
            among: choose one of these classes; labels are then places in this list.
        """
        found = self.probabilities(images)
        return (found if among is None else found[:, self._places(among)]).argmax(1)

    def ordered(self, names: Sequence[str]) -> Classifier:
        """Return the same classifier with its classes in another order."""
        weight, bias = [name for name, _ in _sizes(self.network)][-2:]  # of its outputs
        places = self._places(names)
        moved = {name: self.params[name][places] for name in (weight, bias)}
        return replace(self, class_names=tuple(names), params=self.params | moved)

    def _places(self, names: Sequence[str]) -> list[int]:
        if unknown := [name for name in names if name not in self.class_names]:
            raise InvalidData(
                f"the classifier knows no class '{unknown[0]}', only "
                f"{', '.join(self.class_names[:5])}"
            )
        return [self.class_names.index(name) for name in names]

    @property
    def described(self) -> str:
        """Say what its file holds."""
        return (
            f"the parameters of a {self.name} ({parameter_count(self.params):,} numbers), with its "
            'description; `understudy.load_classifier(".").predict(images)` uses it'
        )

    def to(self, device: torch.device) -> Classifier:
        """Bring it to `device`."""
        return replace(self, params={n: values.to(device) for n, values in self.params.items()})

    def to_bytes(self) -> bytes:
        """Serialise as safetensors; the description stands in the header."""
        about = {"format": FORMAT} | {name: getattr(self, name) for name in DESCRIPTION}
        tensors = {n: values.detach().cpu().contiguous() for n, values in self.params.items()}
        return save_tensors(tensors, metadata={"classifier": json.dumps(about)})

    @classmethod
    def from_bytes(cls, content: bytes) -> Classifier:
        """Read what `to_bytes` wrote."""
        with _reading("classifier"):
            about, tensors = _parts("classifier", content)
            made = cls(**{name: _value(about[name]) for name in DESCRIPTION}, params=tensors)
            if not all(map(is_name, made.class_names)):
                raise ValueError("a class whose name cannot be printed")
            if min(*made.shape, made.width, len(made.class_names)) < 1:
                raise ValueError("no pixels, filters or classes")
            _compare("", _sizes(made.network), tensors)
            return made

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Read a file of what `to_bytes` wrote."""
        return _loaded(cls.from_bytes, path)


DESCRIPTION = ("name", "shape", "width", "class_names", "mean", "std")
"""What the header of a classifier's file says."""
Artefact = SyntheticSet | Classifier
"""What a run releases."""


def codes_of(network: GeneratorNetwork, count: int, seed: int) -> Iterator[Tensor]:
    """Yield the codes that a sample of `count` images is drawn from, part by part."""
    generator = public_generator(seed, "sample")
    for start in range(0, count, CHUNK):
        yield network.codes(min(CHUNK, count - start), generator)


def divided(count: int, shares: Sequence[float]) -> list[int]:
    """Divide `count` by shares: rounded down, and the rest to the largest remainders.

    >>> divided(10, [0.25, 0.25, 0.5]), divided(8, [1 / 3] * 3)
    ([3, 2, 5], [3, 3, 2])
    """
    counts = [math.floor(count * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda c: counts[c] - count * shares[c])
    for place in by_remainder[: count - sum(counts)]:
        counts[place] += 1
    return counts


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn whatever a garbled file leads to into one line."""
    try:
        yield
    except UNREADABLE as error:
        raise InvalidData(
            f"not the file of a {what} ({' '.join(str(error).split())}); expected one that "
            "understudy wrote; verify the directory"
        ) from error


def _parts(what: str, content: bytes) -> tuple[dict[str, Any], Params]:
    """Return the description in the header of a file, and its tensors."""
    tensors = load_tensors(content)
    about: dict[str, Any] = parse_json(metadata(content)[what])
    if about["format"] > FORMAT:
        raise InvalidData(
            f"the {what}'s file has format {about['format']}, this version of understudy reads "
            f"{FORMAT}; use a newer version"
        )
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}")
    return about, tensors


def _loaded(read: Callable[[bytes], Released], path: Path) -> Released:
    try:
        return read(read_whole(path))
    except (OSError, InvalidData) as error:
        raise InvalidData(f"{path}: {error}") from error


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _network(about: dict[str, Any]) -> GeneratorNetwork:
    if about["network"] not in DRAWING:
        raise InvalidData(
            f"the generator's network is '{about['network']}', this version of understudy has "
            f"{', '.join(DRAWING)}; use a newer version"
        )
    config: dict[str, Any] = {key: _value(value) for key, value in about["config"].items()}
    return DRAWING[about["network"]](**config)


def _check(network: GeneratorNetwork, groups: dict[str, Params]) -> None:
    """Refuse tensors that are not those of the network."""
    module = skeleton(network, True)
    _compare("params/", module.named_parameters(), groups["params"])
    _compare("statistics/", module.named_buffers(), groups["statistics"])


def _sizes(network: Network) -> Iterable[tuple[str, Tensor]]:
    """Return tensors without values like a network's parameters: a header may ask for any size."""
    if isinstance(network, ModuleNetwork):
        return skeleton(network).named_parameters()
    with FakeTensorMode():
        return network.init(torch.Generator()).items()


def _compare(group: str, expected: Iterable[tuple[str, Tensor]], tensors: Params) -> None:
    wanted = {n: (like.shape, like.dtype) for n, like in expected if like.is_floating_point()}
    found = {name: (values.shape, values.dtype) for name, values in tensors.items()}
    if wrong := {name for name, _ in wanted.items() ^ found.items()}:
        raise ValueError(f"{group}{min(wrong)} is missing, unknown, or of another shape")
