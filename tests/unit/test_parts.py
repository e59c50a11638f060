"""Parts of a data set by class: what is read, what the ledger lets stand side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from door import some_images
from understudy.data.images import chosen_classes, labelled_images, part_of
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.errors import DataChanged, InvalidData
from understudy.methods.psg import PSG, PSGConfig
from understudy.privacy.registration import RegistrationTerms, declared_facts, find, register

CLOTHES = ("T-shirt/top", "Trouser", "a, b")


def test_a_part_holds_the_records_of_its_classes_and_knows_the_others():
    whole = read_source("digits")
    part = read_source("digits", Reading(only=["6,5"]))
    assert (part.class_names, part.among) == (("5", "6"), whole.class_names)
    assert part.name == "digits-5-6"
    for split, of in ((part, whole), (part.test, whole.test)):
        kept = np.isin(of.labels, (5, 6))
        assert np.array_equal(split.images, of.images[kept])
        assert np.array_equal(split.labels + 5, of.labels[kept])
        assert np.array_equal(split.units, np.arange(len(split.images)))
    assert tuple(part.reading.only) == ("5", "6")
    assert read_source("digits", part.reading).name == part.name


def test_units_of_a_part_are_numbered_anew():
    whole = some_images(12, classes=3, units=[0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0])
    part = part_of(whole, ["1", "2"])
    assert part.units.tolist() == [0, 0, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("Trouser,0", CLOTHES[:2]),
        (["Trouser", "a, b"], CLOTHES[1:]),
        (["2", "1", "0"], CLOTHES),
    ],
)
def test_classes_are_asked_for_by_name_or_number(asked, chosen):
    assert chosen_classes(CLOTHES, asked) == chosen


def test_all_classes_may_be_one_text():
    assert Reading(classes=["ant, bee"]).classes == ("ant", "bee")
    assert Reading(classes=["ant", "bee, or wasp"]).classes == ["ant", "bee, or wasp"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("Trouser,Skirt", "no class 'Skirt'"),
        ("0,3", "no class '3'"),
        ("1,1", "2 or more"),
        ("", "no class ''"),
    ],
)
def test_classes_that_make_no_part_are_refused(asked, message):
    with pytest.raises(InvalidData, match=message):
        chosen_classes(CLOTHES, asked)


def test_a_part_without_images_is_refused():
    whole = labelled_images(np.zeros((4, 8, 8), np.uint8), [0, 0, 1, 1], classes=4)
    with pytest.raises(InvalidData, match="no images of 2, 3"):
        part_of(whole, "2,3")


def test_psg_matches_networks_that_know_of_all_classes():
    part = read_source("digits", Reading(only="1,2"))
    method = PSG(PSGConfig(batch=10), declared_facts(part, RegistrationTerms()), seed=0)
    assert method.facts.class_names == ("1", "2")
    assert method.facts.all_classes == tuple("0123456789")
    assert method.network.classes == 10


def test_parts_of_a_public_set_stand_beside_it(ledger):
    names = [register(ledger, read_source("digits"), RegistrationTerms()).name]
    for only in ("5,6", "1,2", "1,2,3"):
        part = read_source("digits", Reading(only=only))
        names.append(register(ledger, part, RegistrationTerms()).name)
        assert find(ledger, part).name == names[-1]
    assert names == ["digits", "digits-5-6", "digits-1-2", "digits-1-2-3"]


def a_private_set(**described):
    return some_images(40, classes=4, source="/data/scans", name="scans", **described)


def test_parts_of_a_private_set_have_budgets_of_their_own(ledger):
    whole = a_private_set()
    one, other = (
        register(ledger, part_of(whole, only), RegistrationTerms()) for only in ("0,1", "2,3")
    )
    assert one.budget != other.budget
    assert one.facts.units == other.facts.units == 20
    for overlapping in (whole, part_of(whole, "1,2")):
        with pytest.raises(DataChanged):
            register(ledger, overlapping, RegistrationTerms())


def test_the_same_records_told_apart_from_other_classes_are_not_new(ledger):
    part = part_of(a_private_set(), "0,1")
    register(ledger, part, RegistrationTerms())
    with pytest.raises(DataChanged):
        register(ledger, replace(part, among=()), RegistrationTerms())


def test_patients_may_be_in_two_parts(ledger):
    whole = a_private_set(units=np.arange(40) // 4, unit="patient")
    register(ledger, part_of(whole, "0,1"), RegistrationTerms())
    with pytest.raises(DataChanged, match="--new-version-of"):
        register(ledger, part_of(whole, "2,3"), RegistrationTerms())


def test_an_image_in_two_parts_is_noticed(ledger):
    whole = a_private_set()
    whole.images[2] = whole.images[0]  # of classes 2 and 0
    register(ledger, part_of(whole, "0,1"), RegistrationTerms())
    with pytest.raises(DataChanged, match="1 of the images"):
        register(ledger, part_of(whole, "2,3"), RegistrationTerms())
