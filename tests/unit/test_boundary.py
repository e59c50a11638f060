"""The boundary itself: what a vault and a curator refuse, and who reads a record."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

from door import (
    LOOSE,
    a_vault,
    access_to,
    features_of,
    linear_loss,
    linear_params,
    open_curator,
    some_images,
)
from static import static_engine
from understudy.errors import (
    InvalidSettings,
    LedgerError,
    PlanExhausted,
    PlanViolation,
    PrivateAccess,
    UnderstudyError,
)
from understudy.methods.dp_mepf import DPMEPF
from understudy.methods.dp_sgd import DPSGD
from understudy.methods.dp_sinkhorn import DPSinkhorn
from understudy.methods.method import configure
from understudy.methods.psg import PSG
from understudy.methods.rehearsal import Rehearsal
from understudy.privacy.disclosure import disclose_hold_out, disclose_training_records
from understudy.privacy.plan import Budget, Plan, PlannedRelease
from understudy.privacy.sealed import Sealed
from understudy.progress import Progress

TINY_REHEARSAL = {
    "waves": 10, "components": 4, "samples": 30, "networks": 2, "width": 4, "hidden": 3,
    "refine_steps": 2, "refine_batch": 12, "teacher_steps": 4, "taught": 8,
}  # fmt: skip


class Tripwire(torch.Tensor):
    """A tensor that records the call stack of every operation on it and yields plain tensors."""

    reads: list[list[str]]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Tripwire.reads.append([frame.filename for frame in traceback.extract_stack()])
        plain = torch.utils._pytree.tree_map_only(
            Tripwire, lambda t: t.as_subclass(torch.Tensor), (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


def lay_tripwires(vault) -> None:
    Tripwire.reads = []
    for records in (vault._records, vault._held_out):
        for name in ("_images", "_labels"):
            setattr(records, name, getattr(records, name).as_subclass(Tripwire))


def is_under(stack: list[str], *parts: str) -> bool:
    return any(str(Path(*parts)) in name for name in stack)


def test_every_read_of_a_record_lies_under_a_release(ledger, tmp_path):
    """Whole runs, plus the one-shot releases and an evaluation, with tripwires laid."""
    vault = a_vault(ledger, some_images(60, name="tripwire"), hold_out=0.2)
    facts = vault.facts
    lay_tripwires(vault)
    few = {"rounds": 2, "outer": 2, "batches": 2}
    steps = {"steps": 8, "width": 4}
    taught = TINY_REHEARSAL | {"images_per_class": 200}
    for method_class, settings in (
        (PSG, few), (DPSGD, steps), (DPSinkhorn, steps), (Rehearsal, taught),
    ):  # fmt: skip
        releases = len(Tripwire.reads)
        configured = configure(method_class, facts, 10, settings=settings)
        method = method_class(configured.config, facts, seed=0)
        curator = vault.open(
            method.plan(), LOOSE, ledger, workspace=tmp_path / method_class.__name__,
            run_id=method_class.__name__, allow_large_delta=True,
        )  # fmt: skip
        method.run(curator, Progress())
        assert len(Tripwire.reads) >= releases + 8, "the tripwire saw nothing"
    releases = len(Tripwire.reads)
    features = features_of(lambda image: image.flatten(), bound=8.0)
    curator = open_curator(ledger, tmp_path, vault=vault, kind="class_sums", blocks=features.blocks)
    curator.class_sums(features)
    open_curator(ledger, tmp_path, vault=vault, kind="histogram").histogram()
    for stack in Tripwire.reads:
        assert is_under(stack, "understudy", "privacy", "releases")
    assert len(Tripwire.reads) > releases

    Tripwire.reads = []
    members = open_curator(ledger, tmp_path, vault=vault, kind="votes").ensemble(
        torch.zeros(4, 2), members=4
    )
    members.learn(lambda state, images, labels, exist, public: state + 1, torch.arange(2))
    assert Tripwire.reads
    for stack in Tripwire.reads:
        assert is_under(stack, "understudy", "privacy", "ensemble.py")

    Tripwire.reads = []
    curator = open_curator(ledger, tmp_path, vault=vault, kind="sample_gradient")
    members = curator.ensemble(torch.zeros(4), members=4)
    members.learn(lambda state, images, labels, exist, public: images.mean(), torch.arange(2))
    learned = len(Tripwire.reads)
    assert learned
    for stack in Tripwire.reads:
        assert is_under(stack, "understudy", "privacy", "ensemble.py")
    curator.sample_gradient(
        members, lambda state, images, labels: state * images.sum(), torch.zeros(2, 1, 8, 8),
        torch.zeros(2), bound=1.0,
    )  # fmt: skip
    assert len(Tripwire.reads) == learned, "a critic's answer comes from what it learned alone"

    for disclose in (disclose_hold_out, disclose_training_records):
        Tripwire.reads = []
        disclose(vault, ledger, purpose="test")
        assert Tripwire.reads
        for stack in Tripwire.reads:
            assert is_under(stack, "understudy", "privacy", "disclosure.py")


def test_what_decides_on_the_way_was_released(ledger, tmp_path):
    """DP-MEPF keeps the generator that looks best: to a noisy answer, not to the records."""
    vault = a_vault(ledger, some_images(60, name="tripwire"))
    few = {"steps": 4, "batch": 6, "hidden": 8, "images_per_class": 3, "code": 3}
    seen = {"encoder": "random", "layers": ":2", "looks": 2, "count_ratio": 2.0}
    configured = configure(DPMEPF, vault.facts, 10, settings=few | seen)
    method = DPMEPF(configured.config, vault.facts, seed=0)
    curator = vault.open(
        method.plan(), LOOSE, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    lay_tripwires(vault)
    method.run(curator, Progress())
    assert Tripwire.reads
    for stack in Tripwire.reads:
        assert is_under(stack, "understudy", "privacy", "releases")


def test_training_records_are_read_only_after_the_ledger_knows(ledger, monkeypatch):
    vault = a_vault(ledger, some_images(60, name="tripwire"), hold_out=0.2)
    lay_tripwires(vault)

    def full(*_, **__):
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "disclose", full)
        with pytest.raises(LedgerError):
            disclose_training_records(vault, ledger, purpose="test")
    assert not Tripwire.reads
    found = disclose_training_records(vault, ledger, purpose="test")
    assert Tripwire.reads
    for stack in Tripwire.reads:
        assert is_under(stack, "understudy", "privacy", "disclosure.py")
    (row,) = ledger.disclosures(vault.registration.id)
    assert (row["what"], row["purpose"]) == ("training records", "test")
    assert len(found.labels) == vault.facts.units == 48
    assert found.what == "training records of tripwire"


def test_the_tripwire_can_fail(ledger):
    vault = a_vault(ledger)
    lay_tripwires(vault)
    _ = vault._records._images.sum()
    assert not is_under(Tripwire.reads[-1], "understudy", "privacy", "releases")


@pytest.mark.parametrize(
    "ask",
    [
        iter,
        len,
        list,
        np.asarray,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda private: private[0],
        lambda private: 0 in private,
        lambda private: torch.save(private, io.BytesIO()),
    ],
)
@pytest.mark.parametrize("what", ["vault", "curator", "records", "randomness"])
def test_private_state_refuses(what, ask, ledger, tmp_path):
    curator = open_curator(ledger, tmp_path)
    private = {
        "vault": lambda: a_vault(ledger),
        "curator": lambda: curator,
        "records": lambda: curator._records,
        "randomness": lambda: curator._randomness,
    }[what]()
    with pytest.raises(PrivateAccess):
        ask(private)


def test_printing_shows_public_facts_only(ledger, tmp_path):
    one, other = some_images(40, seed=1), some_images(40, seed=2)
    vaults = [a_vault(ledger, one, name="a"), a_vault(ledger, other, name="b")]
    assert repr(vaults[0]).replace(" a:", " b:") == repr(vaults[1])
    for thing in (vaults[0]._records, open_curator(ledger, tmp_path)):
        assert "sealed" in repr(thing)
        assert "sealed" in f"{thing}"


def test_nothing_public_gives_class_counts_or_tensors(ledger, tmp_path):
    curator = open_curator(ledger, tmp_path)
    for sealed in (a_vault(ledger), curator):
        assert isinstance(sealed, Sealed)
        for name in dir(sealed):
            if name.startswith("_"):
                continue
            value = getattr(sealed, name)
            assert not isinstance(value, torch.Tensor | np.ndarray | Sealed), name
            assert "count" not in name


def test_a_release_outside_the_plan_is_refused_before_a_read(ledger, tmp_path):
    vault = a_vault(ledger)
    curator = open_curator(ledger, tmp_path, vault=vault, count=1, dimension=195)
    lay_tripwires(vault)
    params = linear_params()
    wide = {"weight": torch.zeros(3, 65), "bias": torch.zeros(3)}
    refused = [
        lambda: curator.histogram(),
        lambda: curator.histogram(release="gradient"),
        lambda: curator.gradient(linear_loss, params, clip_norm=1.0, release="other"),
        lambda: curator.gradient(linear_loss, wide, clip_norm=1.0),
        lambda: curator.gradient(linear_loss, params, clip_norm=float("inf")),
    ]
    for ask in refused:
        with pytest.raises(PlanViolation):
            ask()
    assert not Tripwire.reads
    assert curator.released == 0

    curator.gradient(linear_loss, params, clip_norm=1.0)
    Tripwire.reads = []
    with pytest.raises(PlanExhausted):
        curator.gradient(linear_loss, params, clip_norm=1.0)
    assert not Tripwire.reads


def test_every_release_is_charged_before_it_is_returned(ledger, tmp_path):
    """The block is in the ledger when the first record is read."""
    vault = a_vault(ledger)
    curator = open_curator(ledger, tmp_path, vault=vault, run_id="charged")
    states = []

    def loss(p, image, label):
        states.append([b.state for b in ledger.blocks("charged")])
        return linear_loss(p, image, label)

    curator.gradient(loss, linear_params(), clip_norm=1.0)
    assert states[0] == ["started"]
    assert ledger.run("charged")["state"] == "reserved"


def test_changing_one_record_changes_only_what_is_released(ledger, tmp_path):
    """With injected draws that never take one unit, that unit changes nothing."""
    outputs = []
    for blank in (False, True):
        data = some_images(40, name=f"world{blank}")
        if blank:
            data.images[7] = 0
        vault = a_vault(ledger, data, unrelated=blank)
        access = access_to(data, select=tuple(u for u in range(40) if u != 7))
        configured = configure(PSG, vault.facts, 10, settings={"rounds": 1, "outer": 1})
        method = PSG(configured.config, vault.facts, seed=0)
        curator = vault.open(
            method.plan(),
            LOOSE,
            ledger,
            workspace=tmp_path / str(blank),
            run_id=str(blank),
            allow_large_delta=True,
            randomness=access.randomness,
        )
        outputs.append(method.run(curator, Progress()).images)
        assert not curator.has_guarantee
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Budget(epsilon=0, delta=1e-5),
        lambda: Budget(epsilon=float("nan"), delta=1e-5),
        lambda: Budget(epsilon=1, delta=0),
        lambda: Budget(epsilon=1, delta=1),
        lambda: Plan(()),
        lambda: PlannedRelease(name="a", kind="gradient", count=0, dimension=1),
        lambda: PlannedRelease(name="a", kind="gradient", count=1, dimension=1, sampling_rate=1.1),
        lambda: PlannedRelease(name="a", kind="gradient", count=1, dimension=1, sampling_rate=0),
        lambda: Plan((PlannedRelease(name="a", kind="histogram", count=1, dimension=1),) * 2),
    ],
)
def test_senseless_plans_and_budgets_are_refused(make):
    with pytest.raises(InvalidSettings):
        make()


def test_user_errors_have_exit_codes():
    assert all(2 <= error.exit_code < 256 for error in UnderstudyError.__subclasses__())


def test_the_methods_engine_holds_nothing_of_a_release(ledger, tmp_path, monkeypatch):
    """A release's program holds the records it reads and the bare sum it found."""
    vault = a_vault(ledger).beside(static_engine(monkeypatch))
    curator = open_curator(ledger, tmp_path, vault=vault)
    curator.gradient(linear_loss, linear_params(), clip_norm=0.1)
    assert len(curator._engine._programs) == 1  # it was compiled
    assert curator.engine._programs == {}
    curator.engine.run(lambda x: 2 * x, torch.ones(3))
    assert len(curator._engine._programs) == len(curator.engine._programs) == 1
