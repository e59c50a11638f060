"""A certificate and its files stand or fall together."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import understudy
from door import seal
from understudy.errors import LedgerError, VerificationFailed
from understudy.files import canonical_json
from understudy.privacy.ledger import Ledger

SETTINGS = {"rounds": 1, "outer": 2, "batches": 2, "inner": 1, "batch": 64}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One finished run and its ledger, made once."""
    folder = tmp_path_factory.mktemp("made")
    understudy.synthesize(
        "digits",
        method="psg",
        settings=SETTINGS,
        out=folder / "run",
        ledger=folder / "ledger.sqlite",
    )
    return folder


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def book(made):
    return Ledger(made / "ledger.sqlite")


def certificate_of(run: Path) -> dict:
    return json.loads((run / "release" / "certificate.json").read_bytes())


def test_a_finished_run_verifies(run, book):
    found = understudy.verify(run, ledger=book)
    assert 10 - 1e-3 <= found.recomputed_epsilon <= 10
    assert found.is_authenticated
    assert understudy.verify(run / "release").recomputed_epsilon == found.recomputed_epsilon
    assert certificate_of(run)["releases"][0]["made"] == 4


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path


def edited(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return "x"


def test_any_single_edit_of_the_certificate_fails(run):
    path = run / "release" / "certificate.json"
    original = certificate_of(run)
    paths = list(leaves(original))
    assert len(paths) > 40
    for keys in paths:
        content = json.loads(json.dumps(original))
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = edited(inner[keys[-1]])
        path.write_bytes(canonical_json(content))
        with pytest.raises(VerificationFailed):
            understudy.verify(run)
    path.write_bytes(canonical_json(original))
    understudy.verify(run)


def test_any_flipped_byte_of_the_certificate_fails(run):
    path = run / "release" / "certificate.json"
    original = path.read_bytes()
    for position in range(0, len(original), 37):
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(VerificationFailed):
            understudy.verify(run)
    for changed in (original + b"\n", original.replace(b"  ", b" ", 1), b"", b"[]"):
        path.write_bytes(changed)
        with pytest.raises(VerificationFailed):
            understudy.verify(run)


@pytest.mark.parametrize("name", ["synthetic.safetensors", "contact_sheet.png", "README.md"])
@pytest.mark.parametrize("edit", ["flip", "truncate", "remove"])
def test_any_edit_of_a_released_file_fails(run, name, edit):
    path = run / "release" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if edit == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(content) if edit == "flip" else bytes(content[:-1]))
    with pytest.raises(VerificationFailed, match=f"{name} is .*; get the release again"):
        understudy.verify(run)


def test_a_file_that_was_added_fails(run):
    (run / "release" / "more.png").write_bytes(b"x")
    with pytest.raises(VerificationFailed, match="not certified; move it out"):
        understudy.verify(run)


@pytest.mark.parametrize("name", ["README.md", "extra"])
def test_a_link_in_a_release_fails(run, tmp_path, name):
    """What it leads to may be another file, or a folder of them, the next time."""
    place = run / "release" / name
    if place.exists():
        place.rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VerificationFailed, match=f"{name} in .* is a link; put the file itself"):
        understudy.verify(run)


def test_a_consistent_edit_of_both_fails_with_the_ledger(run, book):
    card = run / "release" / "README.md"
    card.write_text("A much better guarantee.")
    content = certificate_of(run)
    content["files"]["README.md"] = hashlib.sha256(card.read_bytes()).hexdigest()
    (run / "release" / "certificate.json").write_bytes(seal(content))
    understudy.verify(run)
    with pytest.raises(VerificationFailed, match=r"not issued with the key of .*--ledger-path"):
        understudy.verify(run, ledger=book)


def test_a_forged_plan_does_not_add_up(run):
    """Sealing again does not help a certificate whose numbers contradict each other."""
    for path, value in (
        (("guarantee", "target_epsilon"), 1.0),
        (("guarantee", "epsilon"), 1.0),
        (("releases", 0, "count"), 4000),
        (("releases", 0, "made"), 5),
        (("releases", 0, "noise_multiplier"), 0.3),
        (("guarantee", "delta_split", "sampler_tail"), 0.0),
        (("guarantee", "delta_split", "accounted"), 1e-3),
        (("guarantee", "curve"), [{"delta": 1e-8, "epsilon": 0.0}, {"delta": 1e-8, "epsilon": 99}]),
        (("guarantee", "curve"), [{"delta": 1e-29, "epsilon": 99.0}]),
        (("guarantee", "unit"), "hospital"),
        (("guarantee", "delta"), 0.5),
        (("data_set", "public_facts", "units"), 10**9),
        (("data_set", "composed_total", "epsilon"), 9.0),
    ):
        content = certificate_of(run)
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        forged = run.parent / "forged"
        shutil.copytree(run, forged, dirs_exist_ok=True)
        (forged / "release" / "certificate.json").write_bytes(seal(content))
        with pytest.raises(VerificationFailed, match="; do not rely on it"):
            understudy.verify(forged)


def test_another_ledger_does_not_know_it(run, tmp_path):
    with pytest.raises(VerificationFailed, match="not issued with the key of"):
        understudy.verify(run, ledger=Ledger(tmp_path / "other.sqlite"))
    with pytest.raises(LedgerError, match="there is no ledger"):
        understudy.verify(run, ledger=tmp_path / "nowhere.sqlite")
    assert not (tmp_path / "nowhere.sqlite").exists()


def test_an_older_certificate_of_the_same_ledger_is_not_enough(run, made, book):
    """Authentic, but not what the ledger holds for that run."""
    content = certificate_of(run)
    row = book.run(content["run"])
    assert row["certificate"] == content["seal"]
    book.finish(content["run"], "something else")
    try:
        with pytest.raises(VerificationFailed, match="does not know"):
            understudy.verify(run, ledger=book)
    finally:
        book.finish(content["run"], content["seal"])


def test_a_certificate_tells_nothing_private(run, made):
    text = (run / "release" / "certificate.json").read_text()
    settings = json.loads((run / "private" / "run.json").read_bytes())
    assert settings["ledger"] not in text
    assert str(made) not in text
    digest = Ledger(made / "ledger.sqlite").data_sets()[0]["digest"]
    assert digest.hex() not in text


def test_a_run_without_noise_is_certified_as_none(tmp_path):
    result = understudy.synthesize(
        "digits",
        method="psg",
        epsilon=float("inf"),
        settings=SETTINGS,
        out=tmp_path / "run",
        ledger=tmp_path / "ledger.sqlite",
    )
    assert not result.certificate.has_guarantee
    assert result.certificate.epsilon == float("inf")
    found = understudy.verify(tmp_path / "run", ledger=True)
    assert found.recomputed_epsilon == float("inf")
    assert "None" in (tmp_path / "run" / "release" / "README.md").read_text()


def test_a_large_delta_is_certified(tmp_path):
    result = understudy.synthesize(
        "digits",
        method="psg",
        delta=1e-2,
        accountant="renyi",
        allow_large_delta=True,
        settings=SETTINGS,
        out=tmp_path / "run",
        ledger=tmp_path / "ledger.sqlite",
    )
    assert result.certificate.content["guarantee"]["is_delta_large"]
    understudy.verify(tmp_path / "run", ledger=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["releases"][0].update(count=10**12, made=1), "plan cannot be computed"),
        (lambda c: c["releases"][0].update(noise_multiplier=1e-9), "plan cannot be computed"),
        (lambda c: c["releases"][0].update(noise_ratio=0), "releases.noise_ratio"),
        (lambda c: c["releases"][0].update(kind="nothing"), "of kind 'nothing', expected one of"),
        (lambda c: c["releases"][0].update(noise_multiplier=10**400), "noise_multiplier"),
        (lambda c: c["guarantee"].update(delta="small"), "guarantee.delta"),
        (lambda c: c["guarantee"].update(curve=[{"delta": 0}]), "guarantee.curve.delta"),
        (lambda c: c["data_set"].update(name="\x1b[2J"), "data_set.name"),
        (lambda c: c["data_set"]["public_facts"].update(shape=[1]), "public_facts"),
        (lambda c: c["data_set"]["public_facts"].update(more=1), "public_facts"),
        (lambda c: c["method"].pop("name"), "method.name"),
        (lambda c: c.update(files=["a"]), "files"),
        (lambda c: c.pop("guarantee"), "guarantee"),
    ],
)
def test_what_anybody_may_have_sealed_is_refused_in_one_line(run, change, says):
    """The seal holds, so it is up to the content: no crash, and no hours of computing."""
    content = certificate_of(run)
    change(content)
    (run / "release" / "certificate.json").write_bytes(seal(content))
    with pytest.raises(VerificationFailed, match=says):
        understudy.verify(run)


@pytest.mark.parametrize("text", [b'{"format": 1, "x": NaN}', b'{"format": 1, "x": "\\ud800"}',
                                  b"[" * 100_000, b"\xff", b"null", b"1" * 5000])  # fmt: skip
def test_what_is_no_certificate_is_refused(run, text):
    (run / "release" / "certificate.json").write_bytes(text)
    with pytest.raises(VerificationFailed):
        understudy.verify(run)
