"""Make the stages: an ordinary run for each, one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.data.images import LabelledImages, chosen_classes, part_of
from understudy.data.reading import RECORD
from understudy.errors import Interrupted, InvalidSettings
from understudy.files import canonical_json
from understudy.finished import finished_release, opened
from understudy.job import Request, StopRequest, stop_signals
from understudy.methods import OF_CLASSIFIERS
from understudy.pipeline import Data, load_data, make_run, settle
from understudy.privacy import registration as registrations
from understudy.privacy.group import is_in_group
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import RegistrationTerms
from understudy.progress import Progress
from understudy.runs import RunDirectory, partial


def split(data: Data, groups: Sequence[str | Sequence[str]]) -> list[LabelledImages]:
    """Return the stages of one data set: the records of each group of classes.

    Args:
        data: the whole.
        groups: classes of each stage, as `part_of` takes them: `"5,6"`, or `["5", "6"]`.
    """
    whole = data if isinstance(data, LabelledImages) else load_data(data)
    taken: set[str] = set()
    for group in groups:
        names = chosen_classes(whole.class_names, group)
        if twice := sorted(taken.intersection(names)):
            raise InvalidSettings(f"class '{twice[0]}' is in two stages; leave it out of one")
        taken.update(names)
    return [part_of(whole, group) for group in groups]


def gather(parts: Sequence[LabelledImages]) -> list[LabelledImages]:
    """Return the stages of several data sets, each told which other classes there are.

    A set that was read with more classes than it has keeps only its own; otherwise the others are
    those of the stages before, which are all that is known then.
    """
    stages, known = [], dict[str, None]()
    for part in parts:
        present = [part.class_names[label] for label in np.unique(part.labels)]
        own = part_of(part, present) if len(present) < len(part.class_names) else part
        known |= dict.fromkeys(own.class_names)
        is_more = not own.among and len(known) > len(own.class_names)
        stages.append(replace(own, among=tuple(known)) if is_more else own)
    return stages


def learn_stages(
    stages: Sequence[LabelledImages],
    *,
    out: str | Path,
    ledger: Ledger | str | Path | None = None,
    terms: RegistrationTerms | None = None,
    declare_disjoint: bool = False,
    stop: StopRequest | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **request: Any,
) -> list[Path]:
    """Make one run after another, each of its own records; return their directories.

    Finished stages are left as they are, and an unfinished one goes on.

    Args:
        stages: the records of each stage; see `split` and `gather`.
        out: directory of the stages' directories.
        ledger: path of the ledger that all stages share; by default the user's.
        terms: how to register each stage's records.
        declare_disjoint: declare that no unit is in two stages. Otherwise stages whose units are of
            several records share one budget.
        stop: asked whether to stop at the next committed block; by default signals are.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **request: fields of `Request`, as for `synthesize`.
    """
    if is_in_group():
        raise InvalidSettings("stages were asked for under torchrun; make each with `generate`")
    report, places = progress or Progress(), list[Path]()
    listening = nullcontext(stop) if stop else stop_signals()
    with opened(ledger) as book, listening as should_stop:
        for number, records in enumerate(stages, 1):
            place = Path(out) / f"stage-{number}"
            before = finished_release(places[-1]) if places else None
            asked = settle(
                _request(request, before), records, terms=terms, ledger=book, progress=report
            )
            report.say(f"stage {number} of {len(stages)}: {', '.join(records.class_names)}")
            if RunDirectory(place).is_finished:
                _check_same(place, records, asked, book)
            else:
                rest = f"stage {number} of {len(stages)} is not finished; the same command goes on"
                if should_stop():
                    raise should_stop.interrupted(rest)
                try:
                    make_run(
                        records,
                        out=place,
                        ledger=book,
                        resume=partial(place).exists(),
                        terms=_terms(terms, stages, number, book, declare_disjoint),
                        stop=should_stop,
                        device=device,
                        compile=compile,
                        progress=report,
                        **vars(asked),
                    )
                except Interrupted as error:
                    raise should_stop.interrupted(rest) from error
            places.append(place)
    return places


def _request(given: Mapping[str, Any], before: Path | None) -> Request:
    """Return what a stage is asked to do, given the folder that the stage before released.

    A classifier goes on from the one before; sets stand by themselves.
    """
    asked = Request(**given)
    if before is None or asked.method not in OF_CLASSIFIERS:
        return asked
    return replace(asked, settings={**asked.settings, "start": str(before)})


def _terms(
    given: RegistrationTerms | None,
    stages: Sequence[LabelledImages],
    number: int,
    ledger: Ledger,
    is_declared: bool,
) -> RegistrationTerms:
    """Return how a stage's records are registered, beside those of the stages before."""
    terms = given or RegistrationTerms()
    if terms.name:
        terms = replace(terms, name=f"{terms.name}-{number}")
    if number == 1 or terms.unrelated:
        return terms
    if is_declared:
        return replace(terms, unrelated=True)
    first = registrations.find_exactly(ledger, stages[0])
    if stages[number - 1].unit == RECORD or first is None:
        return terms
    # The same patient may be in several stages: they share what may be spent on them.
    return replace(terms, new_version_of=first.name, lifetime_epsilon=None)


def _check_same(place: Path, records: LabelledImages, asked: Request, ledger: Ledger) -> None:
    """Refuse a finished stage that another command made."""
    found, registered = RunDirectory(place).settings(), registrations.find_exactly(ledger, records)
    request = json.loads(canonical_json(asked.to_json()))
    if found["request"] != request or registered is None or registered.name != found["data_set"]:
        raise InvalidSettings(
            f"{place} is finished, but with other records or settings; repeat the command that "
            "made it, or choose another --out"
        )
