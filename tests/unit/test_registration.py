"""Registration: one record, one budget."""

from __future__ import annotations

import multiprocessing
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from door import some_images
from understudy.errors import DataChanged, RelationMixed
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import RegistrationTerms, register


def registering(path, barrier, answers):
    ledger = Ledger(path)
    data = some_images(200)
    barrier.wait()
    answers.put(register(ledger, data, RegistrationTerms(lifetime_epsilon=1.0)).id)


def test_processes_that_race_register_a_set_once(ledger):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(4), context.Queue()
    racers = [
        context.Process(target=registering, args=(ledger.path, barrier, answers)) for _ in range(4)
    ]
    for racer in racers:
        racer.start()
    assert {answers.get(timeout=60) for _ in racers} == {1}
    for racer in racers:
        racer.join()
    assert len(ledger.data_sets()) == 1


def subset(data, rows, name="part", **changes):
    return replace(
        data, images=data.images[rows], labels=data.labels[rows],
        units=np.arange(len(rows)), name=name, **changes,
    )  # fmt: skip


def test_a_part_of_a_set_shares_its_budget(ledger):
    whole = some_images(40, name="scans")
    first = register(ledger, whole, RegistrationTerms(lifetime_epsilon=3.0))
    some = subset(whole, np.arange(5, 9))
    with pytest.raises(DataChanged, match="4 of the images are also in 'scans'"):
        register(ledger, some, RegistrationTerms())
    version = register(ledger, some, RegistrationTerms(new_version_of="scans"))
    assert (version.budget, version.lifetime_epsilon) == (first.budget, 3.0)
    # The other way round: a set that holds a part of another budget.
    other = some_images(10, seed=9, name="other")
    register(ledger, other, RegistrationTerms())
    mixed = some_images(13, seed=5, name="mixed")
    mixed.images[:3], mixed.images[3:] = whole.images[:3], other.images
    with pytest.raises(DataChanged, match="10 of the images are also in 'other'"):
        register(ledger, mixed, RegistrationTerms(new_version_of="scans"))
    declared = register(ledger, mixed, RegistrationTerms(unrelated=True))
    assert declared.lineage == "declared unrelated"


def test_the_very_images_are_never_unrelated(ledger):
    data = some_images(40, name="scans")
    register(ledger, data, RegistrationTerms(lifetime_epsilon=3.0))
    renamed = some_images(40, name="other", classes=5)
    with pytest.raises(DataChanged, match="not unrelated"):
        register(ledger, renamed, RegistrationTerms(unrelated=True))


@pytest.mark.parametrize(("one", "other"), [("/a/b", "/a/b/c"), ("/a/b/c", "/a/b")])
def test_a_folder_inside_another_is_not_another_set(ledger, one, other):
    register(ledger, some_images(seed=1, source=one, name="one"), RegistrationTerms())
    with pytest.raises(DataChanged, match="lies in, or holds"):
        register(ledger, some_images(seed=2, source=other, name="two"), RegistrationTerms())
    register(ledger, some_images(seed=3, source="/a/bc", name="three"), RegistrationTerms())


def test_a_private_set_is_no_version_of_a_public_one(ledger):
    public = some_images(seed=1, name="mnist", is_public_benchmark=True)
    register(ledger, public, RegistrationTerms())
    private = some_images(seed=2, name="scans")
    with pytest.raises(RelationMixed, match="is a public benchmark"):
        register(ledger, private, RegistrationTerms(new_version_of="mnist"))
    # Parts of a public set need no budget of anyone.
    register(ledger, subset(public, np.arange(5), is_public_benchmark=False), RegistrationTerms())


@pytest.mark.parametrize(("number", "unknown"), [(1, ("images", "rounds")), (2, ("rounds",))])
def test_an_older_ledger_is_brought_up_to_date(ledger, number, unknown):
    registered = register(ledger, some_images(40, name="scans"), RegistrationTerms())
    ledger.close()
    with sqlite3.connect(ledger.path) as old:
        for table in unknown:
            old.execute(f"DROP TABLE {table}")
        old.execute("UPDATE meta SET value = ? WHERE key = 'format'", (str(number).encode(),))
    old.close()
    again = Ledger(ledger.path)
    assert register(again, some_images(40, name="scans"), RegistrationTerms()) == registered
    register(again, some_images(10, seed=3, name="new"), RegistrationTerms())
    assert len(again.shared_images(again.tags([memoryview(b"nothing")]))) == 0
    assert again.rounds_answered("none") == 0
