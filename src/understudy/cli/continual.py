"""`understudy continual`: stages of different parties, and what is learnt from stage to stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from understudy.cli.evaluate import TrainingOptions
from understudy.cli.generate import DEFAULT_METHOD
from understudy.cli.output import Output, OutputOptions, make_output
from understudy.cli.settings import MachineOptions, RunOptions, given, settings_class
from understudy.continual.curve import Curve, evaluate_stages, sentence
from understudy.continual.stages import gather, learn_stages, split
from understudy.data.reading import Reading
from understudy.errors import InvalidSettings
from understudy.job import stop_signals
from understudy.pipeline import load_data
from understudy.privacy.registration import RegistrationTerms

__all__ = ["DEFAULT_METHOD", "build"]


def build(method: str) -> App:
    """Return the command with the settings of `method` as flags, and its `evaluate`."""
    command = App(name="continual")
    command.default(_stages(method))
    command.command(evaluate)
    return command


def _stages(method: str) -> Callable[..., None]:
    def continual(
        *data: str,
        out: Path,
        stages: Annotated[
            tuple[str, ...], Parameter(negative_iterable=(), consume_multiple=True)
        ] = (),
        test: str | None = None,
        declare_disjoint: bool = False,
        minutes: float | None = None,
        ledger: Path | None = None,
        config: Path | None = None,
        method: str = DEFAULT_METHOD,
        keep_private_state: bool = False,
        options: Annotated[RunOptions | None, Parameter(name="*")] = None,
        curve: TrainingOptions | None = None,
        reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
        terms: Annotated[RegistrationTerms | None, Parameter(name="*")] = None,
        machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
        output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
        settings: Any = None,
    ) -> None:
        """Make all stages on one machine, then the curve of accuracy after each of them.

        Each stage is a run of its own, with records that no other stage has. Only what is missing
        is made: stop it at any time, and the same command goes on.

        Each party by itself: `understudy generate DATA --only 5,6`. Whoever receives the released
        folders: `understudy continual evaluate`.

        Parameters
        ----------
        data
            One data set, to be split into --stages; or one folder or file for each stage.
        out
            Directory for stage-1, stage-2, ..., the statement and the curve.
        stages
            Classes of each stage, by name or number: 5,6 1,2 0,8.
        test
            Test set with all classes; by default the data set's own test split, if it has one.
        declare_disjoint
            Declare that no unit (a patient, say) is in two stages; it stands in the statement.
        minutes
            Stop, to be continued, after about so many minutes.
        ledger
            The ledger, if not the user's own.
        config
            TOML file with any of these options; flags on the command line win.
        method
            Method of all stages, see `understudy methods`; auto chooses one for each.
        keep_private_state
            Let a method with teachers write what they learned to private/, to be able to resume.
        curve
            How the classifiers of the curve are trained.
        """
        report, how = make_output(output), vars(reading or Reading())
        whole = [load_data(one, progress=report, **how) for one in data]
        if not whole or (len(whole) > 1) == bool(stages):
            raise InvalidSettings(
                f"{len(whole)} data sets and {len(stages)} groups of classes are given; expected "
                "one data set with --stages 5,6 1,2, or one data set for each stage"
            )
        parts = split(whole[0], stages) if stages else gather(whole)
        where: dict[str, Any] = {
            "ledger": ledger,
            "declare_disjoint": declare_disjoint,
            "progress": report,
            **vars(machine or MachineOptions()),
        }
        with stop_signals() as stop:
            if minutes is not None:
                stop.deadline = time.monotonic() + 60 * minutes
            places = learn_stages(
                parts, out=out, terms=terms, stop=stop, settings=given(settings), method=method,
                keep_private_state=keep_private_state, **where,
                **vars(options or RunOptions()),
            )  # fmt: skip
        if test is None and not (stages and whole[0].test):
            report.result(f"{len(places)} stages, no test set for a curve: {out}", out=str(out))
            return
        tested = whole[0] if test is None else load_data(test, progress=report, **_for_test(how))
        asked = vars(curve or TrainingOptions())
        _show(report, evaluate_stages(places, test=tested, out=out, **where, **asked), out)

    continual.__annotations__["settings"] = Annotated[
        settings_class(method) | None, Parameter(name="*")
    ]
    return continual


def _for_test(reading: dict[str, Any]) -> dict[str, Any]:
    """Return how to read a test set like the records: all its classes, by their own names."""
    return {name: reading[name] for name in ("size", "channels", "skip_bad", "like", "data_dir")}


def evaluate(
    *released: Path,
    test: str,
    out: Path = Path("continual"),
    declare_disjoint: bool = False,
    protocol: str | None = None,
    models: str | None = None,
    ledger: Path | None = None,
    training: Annotated[TrainingOptions | None, Parameter(name="*")] = None,
    reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
    machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Train classifiers on released sets up to each stage and test them on real images.

    Every folder is verified first. What all sets cost together is stated beside the curve: the
    largest epsilon if no unit is in two of the data sets, otherwise the sum.

    Parameters
    ----------
    released
        Released folders of the stages, in order.
    test
        Test set with the classes of all stages, by the same names; a known set gives its test
        split.
    out
        Where to write the statement, and in private/ the curve.
    declare_disjoint
        Declare, for the parties, that no unit is in two of the data sets.
    protocol
        A paper's protocol with all of its models; by default the ConvNet of psg alone.
    models
        Names of models, separated by commas; by default those of the protocol.
    ledger
        The ledger that records the reading of the test set, if not the user's own. If all stages
        were made with it, it also proves that they are disjoint.
    """
    report = make_output(output)
    curve = evaluate_stages(
        released,
        test=load_data(test, progress=report, **vars(reading or Reading())),
        out=out,
        ledger=ledger,
        declare_disjoint=declare_disjoint,
        progress=report,
        protocol=protocol,
        models=models,
        **vars(machine or MachineOptions()),
        **vars(training or TrainingOptions()),
    )
    _show(report, curve, out)


def _show(out: Output, curve: Curve, folder: Path) -> None:
    rows = [
        (
            str(point.stage),
            ", ".join(point.classes),
            point.model,
            str(point.train_images),
            f"{100 * point.mean:.1f}",
            f"{100 * point.std:.1f}",
            ", ".join(f"{100 * accuracy:.1f}" for accuracy in point.accuracies),
        )
        for point in curve.points
    ]
    columns = ("stage", "classes so far", "model", "images", "mean", "std", "per seed")
    out.table(f"Accuracy in %, mean over classes, protocol {curve.protocol}", columns, rows)
    out.result(
        f"{sentence(curve.statement)} Curve: {folder}/private/curve.svg; its numbers are private.",
        **curve.to_json(),
        out=str(folder),
    )
