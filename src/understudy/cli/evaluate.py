"""`understudy evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.measures import MeasureOptions, report
from understudy.cli.output import OutputOptions, make_output
from understudy.cli.settings import MachineOptions
from understudy.evaluation.downstream import Protocol
from understudy.pipeline import evaluate


def command(
    run: Path,
    *,
    test: str | None = None,
    networks: int = 3,
    epochs: int = 1000,
    width: int = 128,
    seed: int = 0,
    ledger: Path | None = None,
    measures: Annotated[MeasureOptions | None, Parameter(name="*")] = None,
    machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Train networks on a synthetic set and test them on real images.

    With --quality or --memorisation, measure those instead.

    The result is computed on real records: it goes to the run's `private/`, and the reading is
    recorded in the ledger.

    Parameters
    ----------
    run
        Directory of the run.
    test
        Test set; by default the registered hold-out or the built-in set's test split.
    networks
        Fresh networks to train.
    epochs
        Epochs of each; the learning rate drops at half.
    width
        Filters per convolution.
    seed
        Seed of initialisation and augmentation.
    ledger
        The ledger, if not the user's own.
    """
    out = make_output(output)
    if measures and (measures.quality or measures.memorisation):
        report(out, run, measures, test=test, ledger=ledger, machine=machine or MachineOptions())
        return
    protocol = Protocol(networks=networks, epochs=epochs, width=width, seed=seed)
    found = evaluate(
        run,
        test=test,
        ledger=ledger,
        protocol=protocol,
        **vars(machine or MachineOptions()),
        progress=out,
    )
    each = ", ".join(f"{100 * accuracy:.1f}" for accuracy in found.accuracies)
    out.result(
        f"ConvNet accuracy {100 * found.mean:.1f} % (mean of {networks}: {each}) on "
        f"{found.test_images} images, {found.tested_on}; private",
        **found.to_json(),
    )
