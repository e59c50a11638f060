"""How near synthetic images lie to training records, against how near other real images lie.

For each image the Euclidean distance to the nearest training record, pixels in [0, 1]. A set that
copies records lies nearer to them than real images that the method never saw. That the distances
look alike proves nothing: pixels are a poor measure of likeness, and what a set may reveal of its
records is bounded by its certificate alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from understudy.errors import InvalidData
from understudy.evaluation.features import whole_float32
from understudy.privacy.disclosure import RealImages
from understudy.progress import Progress
from understudy.synthetic import SyntheticSet

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 1.0)
RARE = 0.01
"""Of the held-out images, the share that lies nearer to a training record than the threshold."""
CLOSEST = 10
CANDIDATES = 4
"""Records per image whose distance is computed again, exactly."""
QUERIES_AT_ONCE, RECORDS_AT_ONCE = 2**12, 2**14

SAME = ("reference",)
"""Measurements that agree in these are repetitions of one another."""


@dataclass(frozen=True, kw_only=True)
class Memorisation:
    """Quantiles of the distances to the nearest training record."""

    reference: str
    held_out_from: str
    images: int
    held_out_images: int
    training_records: int
    synthetic: tuple[float, ...]
    held_out: tuple[float, ...]
    closer_than_held_out: float
    """Share of synthetic images nearer to a training record than 99 % of held-out images."""
    nearest: tuple[int, ...]
    """Places, in the synthetic set, of the images nearest to a training record."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return vars(self) | {"quantiles": QUANTILES}


def memorisation(
    synthetic: SyntheticSet,
    training: RealImages,
    held_out: RealImages,
    *,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Memorisation:
    """Compare the synthetic set's distances to the training records with those of `held_out`."""
    made, given = (
        nearest_distances(images, training.images, device=device, progress=progress)
        for images in (synthetic.images, held_out.images)
    )
    threshold = torch.quantile(given, RARE)
    return Memorisation(
        reference=training.what,
        held_out_from=held_out.what,
        images=len(made),
        held_out_images=len(given),
        training_records=len(training.labels),
        synthetic=_quantiles(made),
        held_out=_quantiles(given),
        closer_than_held_out=float((made < threshold).double().mean()),
        nearest=tuple(made.argsort()[:CLOSEST].tolist()),
    )


def _quantiles(distances: Tensor) -> tuple[float, ...]:
    return tuple(torch.quantile(distances, distances.new_tensor(QUANTILES)).tolist())


def nearest_distances(
    images: Tensor,
    records: Tensor,
    *,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Return the distance of each image to the nearest record (n,), in float64 on the CPU.

    Both are (n, c, h, w): bytes, or floats of which what lies beyond [0, 1] is cut off. Matrix
    products find a few candidates, |r|^2 - 2 q.r in float32; among these the distance is computed
    from differences, for a product loses most digits of a small one.
    """
    if images.shape[1:] != records.shape[1:]:
        raise InvalidData(
            f"images have shape {tuple(images.shape[1:])}, training records "
            f"{tuple(records.shape[1:])}; expected the same"
        )
    if not len(images) or not len(records):
        raise InvalidData("there are no images or no training records to compare; give some")
    if images.is_floating_point() and not bool(torch.isfinite(images).all()):
        raise InvalidData("images are not all finite; expected bytes or floats in [0, 1]")
    where = device or torch.device("cpu")
    found = []
    steps = range(0, len(images), QUERIES_AT_ONCE)
    for step in (progress or Progress()).steps(range(len(steps)), what="nearest records"):
        queries = _pixels(images[steps[step] : steps[step] + QUERIES_AT_ONCE], where)
        places = _candidates(queries, records)
        near = _pixels(records[places.flatten().to(records.device)], where)
        apart = near.view(*places.shape, -1) - queries[:, None]
        found.append(apart.double().square().sum(-1).amin(1).sqrt().cpu())
    return torch.cat(found)


def _candidates(queries: Tensor, records: Tensor) -> Tensor:
    """Return the places of the records that seem nearest to each query (n, candidates)."""
    centre = queries.mean(0)  # short vectors round less
    centred = queries - centre
    few = min(CANDIDATES, len(records))
    best = queries.new_full((len(queries), few), torch.inf)
    places = torch.zeros(len(queries), few, dtype=torch.int64, device=queries.device)
    for start in range(0, len(records), RECORDS_AT_ONCE):
        part = _pixels(records[start : start + RECORDS_AT_ONCE], queries.device) - centre
        with whole_float32():
            score = torch.addmm(part.square().sum(1), centred, part.T, alpha=-2)
        low, where = score.topk(min(few, len(part)), dim=1, largest=False)
        merged, chosen = torch.cat([best, low], 1).topk(few, dim=1, largest=False)
        places = torch.cat([places, where + start], 1).gather(1, chosen)
        best = merged
    return places


def _pixels(images: Tensor, device: torch.device) -> Tensor:
    """Return images as rows of float32 in [0, 1]."""
    there = images.to(device)
    values = there.float() / 255 if there.dtype == torch.uint8 else there.float().clamp(0, 1)
    return values.flatten(1)
