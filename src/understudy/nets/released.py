"""A trained generator as it is released: it draws as many images as one likes, at no cost.

Whatever it draws is post-processing: the guarantee of the run that trained it goes with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from understudy.errors import InvalidData, InvalidSettings
from understudy.nets.generators import GENERATORS, GeneratorNetwork
from understudy.nets.modules import skeleton
from understudy.nets.params import Params
from understudy.seeds import public_generator
from understudy.synthetic import from_whole_bytes, metadata

FORMAT = 1
CHUNK = 250
"""Images that are drawn at once."""
UNREADABLE = (
    AttributeError, KeyError, TypeError, ValueError, RuntimeError, safetensors.SafetensorError,
)  # fmt: skip
"""What reading a garbled file may raise."""
SUM_TOLERANCE = 1e-6
"""How far shares of classes may be from adding up to 1."""


@dataclass(frozen=True, eq=False)
class Generator:
    """A generator with all that drawing from it needs."""

    network: GeneratorNetwork
    params: Params
    statistics: Params
    """Means and variances of its norms."""
    shares: tuple[float, ...] | None = None
    """How much of a drawn set each class is; None for equal parts."""

    def __post_init__(self) -> None:
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
        labels = self._labels(count, per_class)
        drawn = []
        parts = zip(
            codes_of(self.network, len(labels), seed), torch.split(labels, CHUNK), strict=True
        )
        for codes, chosen in parts:
            images = self.network(
                self.params, codes.to(device), chosen.to(device), statistics=self.statistics
            )
            drawn.append((images.clamp(0, 1) * 255).round().byte().cpu())
        return from_whole_bytes(torch.cat(drawn)), labels

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
        name = next(n for n, kind in GENERATORS.items() if type(self.network) is kind)
        about = {
            "format": FORMAT,
            "network": name,
            "config": asdict(self.network),
            "shares": self.shares,
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
        try:
            tensors = load_tensors(content)
            about = json.loads(metadata(content)["generator"])
            network = _network(about)
            groups: dict[str, Params] = {"params": {}, "statistics": {}}
            for name, values in tensors.items():
                group, _, part = name.partition("/")
                groups[group][part] = values
            _check(network, groups)
            shares = about["shares"]
            return cls(network, **groups, shares=None if shares is None else tuple(shares))
        except UNREADABLE as error:
            raise InvalidData(
                f"not the file of a generator ({' '.join(str(error).split())}); expected one that "
                "understudy wrote; verify the directory"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Generator:
        """Read a file of what `to_bytes` wrote."""
        try:
            return cls.from_bytes(path.read_bytes())
        except (OSError, InvalidData) as error:
            raise InvalidData(f"{path}: {error}") from error


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


def _network(about: dict[str, Any]) -> GeneratorNetwork:
    if about["format"] > FORMAT:
        raise InvalidData(
            f"the generator's file has format {about['format']}, this version of understudy reads "
            f"{FORMAT}; use a newer version"
        )
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}")
    if about["network"] not in GENERATORS:
        raise InvalidData(
            f"the generator's network is '{about['network']}', this version of understudy has "
            f"{', '.join(GENERATORS)}; use a newer version"
        )
    config: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in about["config"].items()
    }
    return GENERATORS[about["network"]](**config)


def _check(network: GeneratorNetwork, groups: dict[str, Params]) -> None:
    """Refuse tensors that are not those of the network."""
    module = skeleton(network, True)
    expected: dict[str, Iterator[tuple[str, Tensor]]] = {
        "params": module.named_parameters(),
        "statistics": module.named_buffers(),
    }
    for group, likes in expected.items():
        wanted = {n: (like.shape, like.dtype) for n, like in likes if like.is_floating_point()}
        found = {name: (values.shape, values.dtype) for name, values in groups[group].items()}
        if wrong := {name for name, _ in wanted.items() ^ found.items()}:
            raise ValueError(f"{group}/{min(wrong)} is missing, unknown, or of another shape")
