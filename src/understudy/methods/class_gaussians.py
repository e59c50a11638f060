"""A Gaussian image model of each class, from noisy counts, means and second moments.

All of it is post-processing of what was released. How much noise there is in it is public, and
whatever does not stand out from it is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.nets.params import Params

UNEVEN = 0.5
"""How far sizes of classes are expected to be from equal ones, as a share of these."""
SMALLEST = 0.05
"""Of a class, as a share of an equal one: what its sums are divided by at least."""


def clipped(vector: Tensor, bound: float) -> Tensor:
    """Scale a vector to a norm of at most `bound`."""
    scale: Tensor = bound / vector.norm().clamp(min=bound)
    return vector * scale


def class_sizes(noisy: Tensor, units: float, noise_std: float) -> Tensor:
    """Estimate the sizes of classes (classes,): noisy ones, drawn to equal ones as noise demands.

    >>> class_sizes(torch.tensor([120.0, 80.0, -5.0]), 150, noise_std=0).tolist()
    [120.0, 80.0, 2.5]
    >>> class_sizes(torch.tensor([120.0, 80.0, -5.0]), 150, noise_std=25).tolist()
    [85.0, 65.0, 22.5]
    """
    equal = units / len(noisy)
    trust = 1 / (1 + (noise_std / (UNEVEN * equal)) ** 2)
    return (equal + trust * (noisy - equal)).clamp(min=SMALLEST * equal)


def class_differences(sums: Tensor, sizes: Tensor, noise_std: float) -> Tensor:
    """Estimate how class means differ from the mean of all, from noisy sums (classes, d).

    Where the classes differ hardly more than noise explains, as they do in fast waves, they are
    drawn together: each coordinate is multiplied by the share of its square that is not noise.
    """
    found, noise = sums / sizes[:, None], (noise_std / sizes)[:, None].square()
    signal = (found.square() - noise).mean(0).clamp(min=0)
    tiny = torch.finfo(found.dtype).tiny
    return found * signal / (signal + noise).clamp(min=tiny)


def upper_triangle(vector: Tensor) -> Tensor:
    """Return the products of a vector's entries (d,), each pair once: (d * (d + 1) / 2,).

    Products of different entries count sqrt(2) times, so that the norm is the vector's, squared.

    >>> upper_triangle(torch.tensor([3.0, 4.0])).norm().item()
    25.0
    """
    rows, columns = torch.triu_indices(len(vector), len(vector), device=vector.device)
    weight = torch.where(rows == columns, 1.0, math.sqrt(2))
    return weight * vector[rows] * vector[columns]


def symmetric(triangles: Tensor, dimension: int) -> Tensor:
    """Return the matrices (n, d, d) that triangles (n, d * (d + 1) / 2) are the upper parts of."""
    rows, columns = torch.triu_indices(dimension, dimension, device=triangles.device)
    values = triangles / torch.where(rows == columns, 1.0, math.sqrt(2))
    found = triangles.new_zeros(len(triangles), dimension, dimension)
    found[:, rows, columns] = values
    found[:, columns, rows] = values
    return found


def above_noise(values: Tensor, edge: Tensor) -> Tensor:
    """Estimate eigenvalues from those of a matrix with symmetric noise, whose own reach to `edge`.

    Noise makes each that stands out too large by edge^2 / 4 over itself; others tell nothing.
    """
    stands_out = values.abs() > edge
    rest = (values.square() - edge.square()).clamp(min=0).sqrt()
    return torch.where(stands_out, (values + values.sign() * rest) / 2, 0)


@dataclass(frozen=True)
class ClassGaussians:
    """Images of a class: its mean, and waves along common directions."""

    mean: Tensor
    """(classes, pixels)."""
    basis: Tensor
    """Common directions (components, pixels), orthonormal."""
    factor: Tensor
    """(classes, components, components): what a standard normal code is multiplied by."""

    @property
    def params(self) -> Params:
        """Its part of a generator's parameters."""
        return {"mean": self.mean, "basis": self.basis, "factor": self.factor}

    @classmethod
    def fitted(
        cls,
        means: Tensor,
        moments: Tensor,
        *,
        sizes: Tensor,
        noise_std: float,
        waves: Tensor,
        components: int,
    ) -> ClassGaussians:
        """Fit to what was released, in units of waves.

        A class's covariance is the mean one of all classes, along its main directions, and on top
        of it what in the class stands out from the noise.

        Args:
            means: of each class (classes, waves).
            moments: sums over each class of products of what differs from its mean (classes, ...),
                as `upper_triangle` orders them.
            sizes: of the classes (classes,).
            noise_std: of the sums.
            waves: the waves (waves, pixels).
            components: how many common directions.
        """
        classes, dimension = means.shape
        sums = symmetric(moments.double(), dimension)
        sizes = sizes.double()
        common = sums.sum(0) / sizes.sum()
        main = torch.linalg.eigh(common)
        spread = main.eigenvalues[-components:]
        directions = main.eigenvectors[:, -components:]  # (waves, components)
        edge = noise_std * math.sqrt(2 * dimension * classes) / sizes.sum()
        spread = above_noise(spread, edge).clamp(min=0)
        own = directions.T @ (sums / sizes[:, None, None]) @ directions
        found = torch.linalg.eigh(own - spread.diag())
        edges = noise_std * math.sqrt(2 * components) / sizes
        extra = above_noise(found.eigenvalues, edges[:, None])
        turned = found.eigenvectors
        whole = spread.diag() + turned @ extra.diag_embed() @ turned.mT
        values, vectors = torch.linalg.eigh(whole)
        factor = vectors * values.clamp(min=0).sqrt()[:, None]
        return cls(mean=means @ waves, basis=directions.T.float() @ waves, factor=factor.float())
