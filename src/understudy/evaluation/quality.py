"""How close the synthetic images come to real ones, as distributions.

All distances are computed in float64 from features (see `features`). None of them looks at labels,
and none says whether the images teach a network anything: that is downstream accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from understudy.errors import InvalidData
from understudy.evaluation.features import (
    INCEPTION,
    FeatureNetwork,
    ReferenceNetwork,
    features_of,
)
from understudy.privacy.disclosure import RealImages
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet

KID_SUBSETS, KID_SIZE = 100, 1000
NEIGHBOURS = 3
SPLITS = 10
MOST_DISTANCES = 2**25
"""Distances held at once: 256 MB."""
ROUNDING = 1e-12
"""Squared distances below this part of the squared lengths are rounding, not distance."""

SAME = ("features", "reference")
"""Measurements that agree in these are repetitions of one another."""


class Moments:
    """Mean and covariance of features that come in parts, by updates that do not cancel."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)

    def update(self, features: Tensor) -> Moments:
        """Take in features (n, d)."""
        part = features.double()
        mean = part.mean(0)
        centred = part - mean
        scatter = centred.T @ centred
        if not self.count:
            self.count, self.mean, self._scatter = len(part), mean, scatter
            return self
        total = self.count + len(part)
        step = mean - self.mean
        between = torch.outer(step, step) * (self.count * len(part) / total)
        self._scatter = self._scatter + scatter + between
        self.mean = self.mean + step * (len(part) / total)
        self.count = total
        return self

    @property
    def covariance(self) -> Tensor:
        """Sample covariance: the sum of squares divided by n - 1."""
        if self.count < 2:
            raise InvalidData(
                f"a covariance needs at least 2 images, found {self.count}; give more"
            )
        return self._scatter / (self.count - 1)


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return |m1 - m2|^2 + tr(S1) + tr(S2) - 2 tr((S1 S2)^(1/2)).

    With S1 = F F^T the last trace is the sum of the roots of the eigenvalues of F^T S2 F, which is
    symmetric: nothing turns complex when a covariance lacks rank, as it does with fewer images than
    features. F is that of the set with fewer images, so that it is the smaller one, and keeps only
    the columns that are more than rounding.
    """
    fewer, more = sorted((a, b), key=lambda moments: moments.count)
    factor = _factor(fewer.covariance)
    inner = factor.T @ more.covariance @ factor
    root = torch.linalg.eigvalsh(inner).clamp(min=0).sqrt().sum()
    means = (a.mean - b.mean).square().sum()
    return max(0.0, float(means + fewer.covariance.trace() + more.covariance.trace() - 2 * root))


def _factor(covariance: Tensor) -> Tensor:
    """Return F (d, rank) with F F^T equal to `covariance`."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    return cast(Tensor, vectors[:, kept] * values[kept].sqrt())


def kernel_distance(
    a: Tensor,
    b: Tensor,
    *,
    generator: torch.Generator,
    subsets: int = KID_SUBSETS,
    size: int = KID_SIZE,
) -> tuple[float, float]:
    """Return mean and standard deviation over subsets of the unbiased squared MMD.

    The kernel is that of the kernel inception distance (Bińkowski et al. 2018), (x.y / d + 1)^3. A
    set that has fewer than `size` rows is taken whole each time. Unbiased means that the distance
    of two samples of one distribution is 0 on average, and may be below.
    """
    size = min(size, len(a), len(b))
    if size < 2:
        raise InvalidData("a kernel distance needs at least 2 images in each set; give more")
    found = []
    for _ in range(subsets):
        x, y = (
            part[torch.randperm(len(part), generator=generator)[:size].to(part.device)].double()
            for part in (a, b)
        )
        found.append(_squared_mmd(x, y))
    values = torch.stack(found)
    return float(values.mean()), float(values.std(correction=0))


def _squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    def kernel(first: Tensor, second: Tensor) -> Tensor:
        return (first @ second.T / first.shape[1] + 1).pow(3)

    def of_pairs(values: Tensor) -> Tensor:
        count = len(values)
        return (values.sum() - values.trace()) / (count * (count - 1))

    return of_pairs(kernel(x, x)) + of_pairs(kernel(y, y)) - 2 * kernel(x, y).mean()


def precision_and_recall(
    synthetic: Tensor, real: Tensor, *, neighbours: int = NEIGHBOURS
) -> tuple[float, float] | None:
    """Return the shares of synthetic rows among real ones, and of real rows among synthetic ones.

    A row is among a set if it lies within the ball around any row of that set that reaches to its
    third nearest neighbour (Kynkäänniemi et al. 2019). None if a set has too few rows.
    """
    if min(len(synthetic), len(real)) <= neighbours:
        return None
    made, given = (part.double() - real.double().mean(0) for part in (synthetic, real))
    return _share_among(made, given, neighbours), _share_among(given, made, neighbours)


def _share_among(rows: Tensor, others: Tensor, neighbours: int) -> float:
    """Return the share of `rows` within the manifold of `others`."""
    at_once = max(1, MOST_DISTANCES // len(others))
    reach = torch.cat(
        [  # the nearest of all is the row itself
            _squared_distances(part, others).kthvalue(neighbours + 1, dim=1).values
            for part in torch.split(others, at_once)
        ]
    )
    inside = [
        (_squared_distances(part, others) <= reach).any(1) for part in torch.split(rows, at_once)
    ]
    return float(torch.cat(inside).double().mean())


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    lengths = a.square().sum(1)[:, None] + b.square().sum(1)
    squared = lengths - 2 * a @ b.T
    return torch.where(squared > ROUNDING * lengths, squared, torch.zeros_like(squared))


def inception_score(
    probabilities: Tensor, *, generator: torch.Generator, splits: int = SPLITS
) -> tuple[float, float] | None:
    """Return mean and standard deviation over splits of exp(E KL(p(y|x) | p(y))).

    The images are shuffled first: a set that is sorted by class would have one class in each split,
    and a score of 1. None if a split would have fewer than two images.
    """
    if len(probabilities) < 2 * splits:
        return None
    order = torch.randperm(len(probabilities), generator=generator).to(probabilities.device)
    scores = []
    for part in torch.tensor_split(probabilities[order].double(), splits):
        overall = part.mean(0)
        surprise = torch.special.xlogy(part, part) - torch.special.xlogy(part, overall)
        scores.append(surprise.sum(1).mean().exp())
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0))


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What was measured between a synthetic set and a reference set."""

    features: str
    reference: str
    images: int
    reference_images: int
    frechet_distance: float
    kid: float
    kid_std: float
    precision: float | None
    recall: float | None
    inception_score: float | None
    inception_score_std: float | None
    reference_steps: int | None
    """Steps for which the network that knows the reference set was trained."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the distance is called FID only in Inception's features."""
        content = dict(vars(self))
        distance = content.pop("frechet_distance")
        name = "fid" if self.features == INCEPTION else "frechet_distance"
        return content | {name: distance}


def image_quality(
    synthetic: SyntheticSet,
    real: RealImages,
    *,
    network: FeatureNetwork,
    classifier: ReferenceNetwork | None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Quality:
    """Compare a synthetic set with a reference set.

    Args:
        synthetic: the images to judge.
        real: the reference set.
        network: gives the features.
        classifier: gives class probabilities for the inception score; None to leave it out.
        seed: of the subsets and splits.
        progress: where to report.
    """
    moments, rows = [], []
    for images, what in ((synthetic.images, "synthetic features"), (real.images, "real features")):
        found, parts = Moments(), []
        for part in features_of(network, images, progress=progress, what=what):
            found.update(part)
            parts.append(part)
        moments.append(found)
        rows.append(torch.cat(parts))
    made, given = rows
    kid, kid_std = kernel_distance(made, given, generator=public_generator(seed, "kid"))
    among = precision_and_recall(made, given)
    score = None
    if classifier is not None:
        guessed = classifier.probabilities(synthetic.images)
        score = inception_score(guessed, generator=public_generator(seed, "inception score"))
    return Quality(
        features=network.name,
        reference=real.what,
        images=len(made),
        reference_images=len(given),
        frechet_distance=frechet_distance(*moments),
        kid=kid,
        kid_std=kid_std,
        precision=among and among[0],
        recall=among and among[1],
        inception_score=score and score[0],
        inception_score_std=score and score[1],
        reference_steps=None if classifier is None else classifier.steps,
    )


def check_comparable(synthetic: SyntheticSet, real: RealImages, facts: PublicFacts) -> None:
    """Refuse a reference set of another shape or with other classes."""
    if real.images.shape[1:] != synthetic.images.shape[1:]:
        raise InvalidData(
            f"the reference images have shape {tuple(real.images.shape[1:])}, the synthetic ones "
            f"{tuple(synthetic.images.shape[1:])}; expected the same"
        )
    if int(real.labels.max()) >= facts.classes:
        raise InvalidData(
            f"the reference set has label {int(real.labels.max())}, the synthetic set "
            f"{facts.classes} classes; expected the same classes"
        )
