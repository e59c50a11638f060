"""When several sets cost the largest epsilon, and when the sum."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import understudy
from door import some_images
from understudy.data.images import part_of
from understudy.errors import InvalidSettings, RelationMixed
from understudy.privacy.certificate import Certificate
from understudy.privacy.composition import compose, kinship
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import RegistrationTerms, register

TINY = {"rounds": 1, "outer": 1, "batches": 1, "inner": 1, "batch": 8, "width": 2}


counter = itertools.count()


def a_certificate(epsilon=2.0, delta=1e-5, unit="record", **guarantee) -> Certificate:
    facts = {"class_names": ["a", "b"], "units": 10, "unit": unit}
    total = {"runs": 1, "epsilon": epsilon}
    return Certificate(
        {
            "run": f"run-{next(counter)}",
            "guarantee": {"kind": "dp", "epsilon": epsilon, "delta": delta} | guarantee,
            "data_set": {"name": "set", "public_facts": facts, "composed_total": total},
            "method": {"name": "psg"},
        }
    )


def test_without_proof_or_declaration_they_add_up():
    found = compose([a_certificate(2.0), a_certificate(3.0, delta=1e-6)])
    assert found.kind == "sum"
    assert found.epsilon == pytest.approx(5.0)
    assert found.delta == pytest.approx(1.1e-5)
    assert "no ledger" in found.why


def test_declared_disjoint_the_largest_holds():
    found = compose([a_certificate(2.0), a_certificate(3.0, delta=1e-6)], declared=True)
    assert (found.kind, found.epsilon, found.delta) == ("declared", 3.0, 1e-5)
    assert "nothing here proves it" in found.why


def test_units_of_different_kinds_do_not_add_up():
    sets = [a_certificate(), a_certificate(unit="patient")]
    with pytest.raises(RelationMixed, match="record, patient"):
        compose(sets)
    assert compose(sets, declared=True).units == ("record", "patient")


@pytest.mark.parametrize("declared", [True, False])
def test_one_set_without_a_guarantee_leaves_none(declared):
    sets = [a_certificate(), a_certificate(epsilon=None, kind="none")]
    found = compose(sets, declared=declared)
    assert found.epsilon is None
    json.dumps(found.to_json(), allow_nan=False)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """Runs on two parts of a private set, a second run on the first part, one on a set with images
    of it, and another ledger's."""
    folder = tmp_path_factory.mktemp("private")
    whole = some_images(40, classes=4, source="/data/scans", name="scans")

    def made(name, data, ledger="ledger.sqlite", **terms):
        return understudy.synthesize(
            data,
            method="psg",
            settings=TINY,
            accountant="renyi",
            out=folder / name,
            ledger=folder / ledger,
            terms=RegistrationTerms(**terms),
        ).certificate

    one, other = part_of(whole, "0,1"), part_of(whole, "2,3")
    near = some_images(40, seed=1, name="near")
    near.images[:3] = one.images[:3]
    book = Ledger(folder / "ledger.sqlite")
    yield {
        "one": made("one", one), "other": made("other", other), "again": made("again", one),
        "near": made("near", near, unrelated=True),
        "elsewhere": made("elsewhere", other, "elsewhere.sqlite"), "book": book,
    }  # fmt: skip
    book.close()


def test_the_ledger_proves_what_it_registered(private):
    found = compose([private["one"], private["other"]], ledger=private["book"])
    assert found.kind == "proved"
    assert found.epsilon == private["one"].epsilon
    assert [part.classes for part in found.parts] == [("0", "1"), ("2", "3")]


def test_two_runs_on_one_set_add_up_whatever_is_declared(private):
    sets = [private["one"], private["again"]]
    found = compose(sets, ledger=private["book"])
    assert found.kind == "sum"
    assert found.epsilon == pytest.approx(2 * private["one"].epsilon)
    assert "versions of one" in found.why
    assert found.parts[1].runs == 2
    with pytest.raises(InvalidSettings, match="leave out --declare-disjoint"):
        compose(sets, ledger=private["book"], declared=True)


def test_sets_with_images_in_common_add_up_whatever_is_declared(private):
    sets = [private["one"], private["near"]]
    found = compose(sets, ledger=private["book"])
    assert (found.kind, found.epsilon) == ("sum", pytest.approx(2 * private["one"].epsilon))
    assert "3 images in common" in found.why
    with pytest.raises(InvalidSettings, match="3 images in common; leave out --declare-disjoint"):
        compose(sets, ledger=private["book"], declared=True)


@pytest.mark.parametrize("known", [("one", "again"), ("one", "near")])
def test_a_set_of_another_ledger_hides_nothing_that_this_one_knows(private, known):
    sets = [private[name] for name in ("elsewhere", *known)]
    with pytest.raises(InvalidSettings, match="leave out --declare-disjoint"):
        compose(sets, ledger=private["book"], declared=True)
    assert "nobody declares" not in compose(sets, ledger=private["book"]).why
    assert compose(sets[:2], ledger=private["book"], declared=True).kind == "declared"


@pytest.mark.parametrize("declared", [True, False])
def test_a_set_is_given_once(private, declared):
    for book in (private["book"], None):
        sets = [private["one"], private["elsewhere"], private["one"]]
        with pytest.raises(InvalidSettings, match="is given twice"):
            compose(sets, ledger=book, declared=declared)


def test_federations_may_have_folders_of_one_name():
    said = {"run": "federation/out", "federation": {}}
    one, other = (
        Certificate(a_certificate().content | said | {"seal": seal}) for seal in ("a", "b")
    )
    assert compose([one, other], declared=True).kind == "declared"
    with pytest.raises(InvalidSettings, match="federation/out is given twice"):
        compose([one, other, one])


def test_a_ledger_proves_nothing_about_sets_of_another(private):
    found = compose([private["one"], private["elsewhere"]], ledger=private["book"])
    assert found.kind == "sum"
    assert "no ledger" in found.why


def test_a_forged_certificate_is_not_of_the_ledger(private):
    forged = Certificate(
        {**private["other"].content, "guarantee": private["one"].content["guarantee"] | {"x": 1}}
    )
    assert compose([private["one"], forged], ledger=private["book"]).kind == "sum"


def related(ledger, one, other):
    found = kinship(ledger, *(register(ledger, data, terms) for data, terms in (one, other)))
    return found.is_disjoint, found.why


PLAIN, UNRELATED = RegistrationTerms(), RegistrationTerms(unrelated=True)


def test_patients_cannot_be_compared(ledger):
    patients = {"units": np.arange(40) // 2, "unit": "patient"}
    one, other = (some_images(seed=seed, **patients) for seed in (0, 1))
    is_disjoint, why = related(ledger, (one, PLAIN), (other, PLAIN))
    assert not is_disjoint
    assert "units of several records" in why


def test_images_in_common_show_that_patients_are(ledger):
    patients = {"units": np.arange(40) // 2, "unit": "patient"}
    one, other = (some_images(seed=seed, **patients) for seed in (0, 1))
    other.images[:2] = one.images[:2]
    sets = register(ledger, one, PLAIN), register(ledger, other, UNRELATED)
    assert kinship(ledger, *sets).is_shared


def test_images_in_common_are_no_proof(ledger):
    one, other = some_images(seed=0), some_images(seed=1)
    assert related(ledger, (one, PLAIN), (other, PLAIN)) == (
        True, "'array' and 'array-2' have 0 images in common",
    )  # fmt: skip
    third = replace(some_images(seed=2))
    third.images[:3] = one.images[:3]
    is_disjoint, why = related(ledger, (one, PLAIN), (third, UNRELATED))
    assert not is_disjoint
    assert "3 images in common" in why


def test_images_of_other_shapes_cannot_be_compared(ledger):
    one, other = some_images(), some_images(shape=(1, 9, 9))
    assert related(ledger, (one, PLAIN), (other, PLAIN))[0] is False


def test_public_sets_are_told_apart_by_their_classes(ledger):
    whole = understudy.load_data("digits")
    parts = [(part_of(whole, only), PLAIN) for only in ("0,1", "2,3", "3,4")]
    assert related(ledger, parts[0], parts[1])[0]
    assert not related(ledger, parts[1], parts[2])[0]
    assert not related(ledger, parts[0], (whole, PLAIN))[0]
