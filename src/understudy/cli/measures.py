"""What `understudy evaluate --quality` and `--memorisation` ask for and print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.cli.output import Output
from understudy.cli.settings import MachineOptions
from understudy.evaluation.features import ReferenceTraining
from understudy.evaluation.memorisation import QUANTILES, Memorisation
from understudy.evaluation.quality import Quality
from understudy.measures import FeatureName, Reference, measure_memorisation, measure_quality


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What to measure instead of accuracy."""

    quality: bool = False
    """Measure image quality: Fréchet and kernel distance, precision, recall, inception score."""
    memorisation: bool = False
    """Measure how near the images lie to training records, against unseen real images."""
    features: FeatureName = "inception"
    """Features for --quality: inception (FID), or convnet (trained on the reference set)."""
    reference: Reference = "test"
    """Real images for --quality: the test set, or the training records."""
    reference_steps: int = 1000
    """Steps for which the network that knows the reference set is trained."""


def report(
    out: Output,
    run: Path,
    options: MeasureOptions,
    *,
    test: str | None,
    ledger: Path | None,
    machine: MachineOptions,
) -> None:
    """Measure what was asked for and print it."""
    if options.quality:
        quality = measure_quality(
            run,
            features=options.features,
            reference=options.reference,
            test=test,
            training=ReferenceTraining(steps=options.reference_steps),
            ledger=ledger,
            **vars(machine),
            progress=out,
        )
        _print_quality(out, quality)
    if options.memorisation:
        found = measure_memorisation(
            run, test=test, ledger=ledger, device=machine.device, progress=out
        )
        _print_memorisation(out, found)


def _print_quality(out: Output, found: Quality) -> None:
    def number(value: float | None, std: float | None = None) -> str:
        if value is None:
            return "too few images"
        return f"{value:.4g}" if std is None else f"{value:.4g} +- {std:.2g}"

    distance = "FID" if found.features == "inception" else "Fréchet distance"
    kernel = "KID" if found.features == "inception" else "kernel distance"
    rows = [
        (distance, number(found.frechet_distance), "0: same mean and covariance"),
        (kernel, number(found.kid, found.kid_std), "0: same distribution"),
        ("precision", number(found.precision), "share of synthetic images that look real"),
        ("recall", number(found.recall), "share of real images that are covered"),
        (
            "inception score",
            number(found.inception_score, found.inception_score_std),
            "1 to the number of classes",
        ),
    ]
    out.table(f"Image quality, features: {found.features}", ("measure", "value", "means"), rows)
    out.result(
        f"{found.images} synthetic images against {found.reference_images} images, "
        f"{found.reference}; private",
        **found.to_json(),
    )


def _print_memorisation(out: Output, found: Memorisation) -> None:
    rows = [
        (f"{100 * share:g} %", f"{made:.3f}", f"{given:.3f}")
        for share, made, given in zip(QUANTILES, found.synthetic, found.held_out, strict=True)
    ]
    out.table(
        "Distance to the nearest training record", ("quantile", "synthetic", "held out"), rows
    )
    out.result(
        f"{100 * found.closer_than_held_out:.1f} % of {found.images} synthetic images lie nearer "
        f"to a training record than 99 % of {found.held_out_images} images, "
        f"{found.held_out_from}; private",
        **found.to_json(),
    )
