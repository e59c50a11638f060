"""`understudy evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from understudy.cli.measures import MeasureOptions, report
from understudy.cli.output import JsonOutput, Output, OutputOptions, make_output
from understudy.cli.settings import MachineOptions
from understudy.evaluation.downstream import REAL, Utility
from understudy.measures import evaluate, measure_convergence


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How classifiers are trained."""

    seeds: int | None = None
    """How often each model is trained; by default as the protocol says."""
    epochs: int | None = None
    """Epochs of each network; by default as the protocol says."""
    width: int = 128
    """Filters per convolution of the ConvNet."""
    seed: int = 0
    """Seed of initialisation, order of batches and augmentation."""
    subsample: int | None = None
    """Train on so many images of each class."""
    soft_labels: bool = True
    """Train networks on probabilities of classes, if the set has them."""
    augment: bool = True
    """Change images at random while networks train on them, where the protocol does."""


def command(
    run: Path,
    *,
    test: str | None = None,
    protocol: str | None = None,
    models: str | None = None,
    ceiling: bool = False,
    missing: bool = False,
    convergence: bool = False,
    ledger: Path | None = None,
    training: Annotated[TrainingOptions | None, Parameter(name="*")] = None,
    measures: Annotated[MeasureOptions | None, Parameter(name="*")] = None,
    machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Train classifiers on a synthetic set and test them on real images.

    The classifier of a run that trained one is tested as it is.

    With --quality or --memorisation, measure those instead; with --convergence, evaluate the sets
    that the run kept on the way.

    The results are computed on real records: they go to the run's `private/`, and the reading is
    recorded in the ledger.

    Parameters
    ----------
    run
        Directory of the run.
    test
        Test set; by default the set's own test split, or else its registered hold-out.
    protocol
        A paper's protocol (psg, dp-merf, dp-mepf, datalens, dpimagebench) with all of its models;
        by default the ConvNet of psg alone.
    models
        Names of models, separated by commas; by default those of the protocol.
    ceiling
        Train on the real training records as well: what the best synthetic set could reach.
    missing
        Compute only what was not measured before.
    convergence
        Evaluate the snapshots instead: accuracy against the epsilon spent.
    ledger
        The ledger; by default the one that the run was made with.
    """
    out = make_output(output)
    if measures and (measures.quality or measures.memorisation):
        report(out, run, measures, test=test, ledger=ledger, machine=machine or MachineOptions())
        return
    asked: dict[str, Any] = {
        "test": test,
        "ledger": ledger,
        "protocol": protocol,
        "models": models,
        **vars(training or TrainingOptions()),
        **vars(machine or MachineOptions()),
        "progress": out,
    }
    if convergence:
        _show_points(out, measure_convergence(run, **asked))
    else:
        _show(out, evaluate(run, **asked, ceiling=ceiling, missing=missing))


def _show_points(out: Output, points: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            f"{point['epsilon']:.3g}",
            str(point["releases"]),
            point["model"],
            f"{100 * point['mean']:.1f}",
            f"{100 * point['std']:.1f}",
        )
        for point in points
    ]
    columns = ("epsilon spent", "releases", "model", "mean", "std")
    out.table(f"Accuracy in %, protocol {points[0]['protocol']}", columns, rows)
    out.result(f"on {points[0]['test_images']} images; these numbers are private")


def _show(out: Output, found: Sequence[Utility]) -> None:
    if isinstance(out, JsonOutput):
        for one in found:
            out.result("", **one.to_json())
        return
    rows = [
        (
            one.model + (", real data" if one.trained_on == REAL else ""),
            f"{100 * one.mean:.1f}",
            f"{100 * one.std:.1f}",
            ", ".join(f"{100 * accuracy:.1f}" for accuracy in one.accuracies),
            f"{one.seconds:.0f}",
        )
        for one in found
    ]
    first = found[0]
    title = f"Accuracy in %, protocol {first.protocol}"
    out.table(title, ("model", "mean", "std", "per seed", "seconds"), rows)
    out.result(f"on {first.test_images} images, {first.tested_on}; these numbers are private")
