"""`understudy pretrain`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.cli.settings import MachineOptions
from understudy.data.reading import Reading
from understudy.pipeline import load_data
from understudy.pretraining import pretrain
from understudy.training.pretraining import Pretraining


def command(
    data: str,
    *,
    out: Path,
    public: bool = False,
    ledger: Path | None = None,
    training: Annotated[Pretraining | None, Parameter(name="*")] = None,
    reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
    machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Train a small ResNet18 on PUBLIC labelled images: an encoder for methods that use one.

    Nothing protects the images given here. See docs/public.md for what counts as public.

    Parameters
    ----------
    data
        Name of a known set (digits, mnist, cifar10, ...), or path of a folder or file of images.
    out
        File to write, NAME.safetensors.
    public
        Declare that the set is public; needed for all but known sets that were verified.
    ledger
        The ledger that knows what is private, if not the user's own.
    """
    report = make_output(output)
    made = pretrain(
        load_data(data, progress=report, **vars(reading or Reading())),
        out=out,
        public=public,
        ledger=ledger,
        **vars(machine or MachineOptions()),
        progress=report,
        **vars(training or Pretraining()),
    )
    accuracy = made.header.test_accuracy
    judged = "no test split" if accuracy is None else f"{100 * accuracy:.1f} % on its test split"
    report.result(
        f"encoder trained on {made.header.images} public images of {made.header.trained_on}, "
        f"{judged}: {made.path}",
        **asdict(made.header),
        path=str(made.path),
    )
