"""A released generator: saved and certified with the set, and drawn from again."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import understudy
from door import some_images
from understudy.cli.main import main
from understudy.errors import InvalidData, InvalidSettings, OutputExists, VerificationFailed
from understudy.exports import FORMS
from understudy.job import assist, tell_others
from understudy.methods import METHODS
from understudy.report.listing import list_runs
from understudy.runs import GENERATOR_FILE, SET_FILE
from understudy.synthetic import SyntheticSet, from_whole_bytes, whole_bytes


def make(folder, name="run", **request):
    request = {"method": "painter", "epsilon": 8, "accountant": "renyi"} | request
    return understudy.synthesize(
        some_images(60, name="pets"),
        out=folder / name, ledger=folder / "ledger", delta=1e-3, device="cpu", **request,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a run with a generator, one without a guarantee, and one that has images alone."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "painter", "painter:Painter")
        quick = {"rounds": 1, "outer": 1, "batches": 1, "inner": 1, "images_per_class": 1}
        yield {
            "run": make(folder),
            "noiseless": make(folder, "noiseless", epsilon=float("inf")),
            "psg": make(folder, "psg", method="psg", settings=quick),
        }


@pytest.fixture
def run(finished, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(finished["run"].directory, tmp_path / "copy")


def call(*arguments, capsys):
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_generator_is_released_described_and_certified(finished):
    result = finished["run"]
    release = result.directory / "release"
    certificate = json.loads((release / "certificate.json").read_text())
    assert set(certificate["files"]) == {
        SET_FILE, "contact_sheet.png", "README.md", GENERATOR_FILE,
    }  # fmt: skip
    assert understudy.verify(release).files == 4
    card = (release / "README.md").read_text()
    assert f"`{GENERATOR_FILE}`" in card
    assert "uint8" in card
    assert "float32" not in card
    again = understudy.load(release).generator.sample(20, seed=0)
    assert torch.equal(again[0], result.images)
    assert torch.equal(again[1], result.labels)


def test_without_one_nothing_is_said_of_it(finished):
    release = finished["psg"].directory / "release"
    assert not (release / GENERATOR_FILE).exists()
    card = (release / "README.md").read_text()
    assert GENERATOR_FILE not in card
    assert "float32" in card
    assert load_file(release / SET_FILE)["images"].dtype == torch.float32
    assert understudy.load(release).generator is None


def test_more_can_be_drawn_than_was_released(finished, tmp_path):
    directory = finished["run"].directory
    drawn = understudy.sample(directory, count=301, seed=5, out=tmp_path / "set.safetensors")
    assert len(drawn) == 301
    assert drawn.class_names == ("0", "1", "2")
    back = SyntheticSet.load(tmp_path / "set.safetensors")
    assert torch.equal(back.images, drawn.images)
    assert torch.equal(back.labels, drawn.labels)
    release = directory / "release"
    assert torch.equal(understudy.sample(release, count=301, seed=5).images, drawn.images)
    assert not torch.equal(understudy.sample(release, count=301, seed=6).images, drawn.images)
    each = understudy.sample(directory, per_class=4)
    assert each.labels.bincount().tolist() == [4, 4, 4]
    assert list(tmp_path.iterdir()) == [tmp_path / "set.safetensors"]


def test_a_damaged_generator_is_not_used(run, tmp_path):
    file = run / "release" / GENERATOR_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(VerificationFailed, match=f"{GENERATOR_FILE} is not the file"):
        understudy.sample(run, count=3, out=tmp_path / "out")
    file.unlink()
    with pytest.raises(VerificationFailed, match=f"{GENERATOR_FILE} is certified but missing"):
        understudy.sample(run, count=3, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_garbled_generator_is_one_line_for_whoever_loads_the_run(run):
    (run / "release" / GENERATOR_FILE).write_bytes(b"garbled")
    with pytest.raises(InvalidData, match=f"{GENERATOR_FILE}: not the file of a generator"):
        understudy.load(run)


def test_a_run_of_images_alone_is_refused(finished):
    with pytest.raises(InvalidSettings, match="has no generator: psg makes images alone"):
        understudy.sample(finished["psg"].directory, count=3)


def test_without_a_guarantee_a_flag_is_needed(finished):
    directory = finished["noiseless"].directory
    with pytest.raises(InvalidSettings, match="--without-guarantee"):
        understudy.sample(directory, count=3)
    assert len(understudy.sample(directory, count=3, without_guarantee=True)) == 3


@pytest.mark.parametrize("asked", [{}, {"count": 0}, {"count": 2, "per_class": 2}])
def test_bad_numbers_write_nothing(finished, tmp_path, asked):
    with pytest.raises(InvalidSettings):
        understudy.sample(finished["run"].directory, out=tmp_path / "out", **asked)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_overwritten(finished, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputExists, match="choose another --out"):
        understudy.sample(finished["run"].directory, count=3, out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_command(run, tmp_path, capsys):
    code, out, _ = call("sample", run, "--count", 7, "--json", capsys=capsys)
    assert code == 0
    expected = tmp_path / "copy-samples.safetensors"
    assert json.loads(out) == {"event": "result", "file": str(expected), "images": 7}
    assert len(SyntheticSet.load(expected)) == 7
    code, _, err = call("sample", run / "release", "--per-class", 2, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)  # the same file
    assert "exists already" in err
    other = tmp_path / "other.safetensors"
    code, out, _ = call("sample", run, "--per-class", 2, "--seed", 3, "--out", other, capsys=capsys)
    assert code == 0
    assert "6 images" in out
    assert torch.equal(
        SyntheticSet.load(other).images, understudy.sample(run, per_class=2, seed=3).images
    )
    (run / "release" / GENERATOR_FILE).write_bytes(b"")
    assert call("sample", run, "--count", 1, "--out", tmp_path / "x", capsys=capsys)[0] == 5


@pytest.mark.parametrize("to", FORMS)
def test_every_export_takes_a_set_of_bytes(finished, tmp_path, to):
    found = understudy.export(finished["run"].directory, to=to, out=tmp_path / "out")
    assert found.images == 20
    images, card = finished["run"].images, (tmp_path / "out" / "README.md").read_text()
    assert GENERATOR_FILE not in card
    if to == "npz":
        with np.load(tmp_path / "out" / "synthetic.npz") as arrays:
            assert np.array_equal(arrays["images"], images.numpy())
        assert "float32" in card
    if to == "safetensors":
        assert torch.equal(SyntheticSet.load(
            tmp_path / "out" / SET_FILE).images, images)  # fmt: skip
        assert "uint8" in card


def test_reports_lists_and_evaluations_take_a_set_of_bytes(finished, tmp_path):
    directory = finished["run"].directory
    lines = {line.name: line for line in list_runs(directory.parent)}
    assert lines["run"].images == "20"
    assert lines["psg"].images == "3"
    page = understudy.write_report([directory], out=tmp_path / "page.html", shareable=True)
    assert page.read_text().count("data:image/png") > 15
    (found,) = understudy.evaluate(
        directory, test=some_images(12, seed=1), models=["mlp"], epochs=1, seeds=1,
        ledger=directory.parent / "ledger", device="cpu",
    )  # fmt: skip
    assert found.test_images == 12


class Recorded:
    """A group of two, one after the other: what the leader says, the other hears."""

    def __init__(self, leads, messages):
        self.leads, self.messages = leads, messages

    def bytes_from_leader(self, content):
        if not self.leads:
            return self.messages.pop(0)
        self.messages.append(content)
        return content


@pytest.mark.parametrize("name", ["run", "psg"])
def test_other_processes_are_told_of_the_generator(finished, name):
    messages, result = [], finished[name]
    tell_others(Recorded(True, messages), result)
    heard = assist(None, None, engine=None, group=Recorded(False, messages))
    assert messages == []
    assert torch.equal(heard.images, result.images)
    ours, theirs = heard.synthetic.generator, result.synthetic.generator
    assert (ours is None) == (theirs is None) == (name == "psg")
    if ours:
        assert torch.equal(ours.sample(3, seed=1)[0], theirs.sample(3, seed=1)[0])


def a_set(images):
    return SyntheticSet(images, torch.zeros(len(images), dtype=torch.int64), ("a",))


def test_whole_bytes_are_stored_as_such_without_loss():
    every = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    images = torch.from_numpy((every.numpy() / np.float32(255)).astype(np.float32))
    content = a_set(images).to_bytes()
    assert len(content) < images.numel() * 4
    back = SyntheticSet.from_bytes(content).images
    assert back.dtype == torch.float32
    assert torch.equal(back.view(torch.int32), images.view(torch.int32))
    assert torch.equal(whole_bytes(images), every)
    assert torch.equal(from_whole_bytes(every), images)
    turned = images.transpose(2, 3)
    assert torch.equal(SyntheticSet.from_bytes(a_set(turned).to_bytes()).images, turned)
    assert len(SyntheticSet.from_bytes(a_set(images[:0]).to_bytes())) == 0


@pytest.mark.parametrize(
    "other", [0.5, 1 / 255 + 1e-7, 256 / 255, -1 / 255, -0.0, float("nan"), float("inf")]
)
def test_one_other_pixel_keeps_all_bits(other):
    images = torch.ones(3, 1, 8, 8)
    images[2, 0, 7, 7] = other
    assert whole_bytes(images) is None
    back = SyntheticSet.from_bytes(a_set(images).to_bytes()).images
    assert torch.equal(back.view(torch.int32), images.view(torch.int32))
    assert "float32" in a_set(images).described
    assert whole_bytes(images.double()) is None
