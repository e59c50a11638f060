"""The command line as a person or a script meets it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from understudy.cli.main import main
from understudy.job import StopRequest
from understudy.privacy import ledger as ledgers

TINY = [
    "--method", "psg", "--rounds", "1", "--outer", "2", "--batches", "2", "--inner", "1",
    "--accountant", "renyi",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERSTUDY_LEDGER", str(tmp_path / "ledger.sqlite"))
    return tmp_path


def call(*arguments: str, capsys) -> tuple[int, str, str]:
    """Run the command line in this process; return (exit code, stdout, stderr)."""
    code = 0
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def npz(folder: Path, name: str = "scans.npz", count: int = 60, **changes) -> Path:
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (count, 8, 8), dtype=np.uint8),
        "labels": np.arange(count) % 3,
        "patient": np.arange(count) // 3,
    } | changes
    np.savez(folder / name, **arrays)
    return folder / name


def test_help_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from understudy.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'dp_accounting', 'jinja2'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "HEAVY []" in done.stdout
    for command in (
        "generate", "evaluate", "plan", "verify", "register", "ledger", "methods", "fetch",
        "export", "report", "runs", "sample", "pretrain",
    ):  # fmt: skip
        assert command in done.stdout


def test_the_whole_way(folder, capsys):
    path = npz(folder)
    code, out, _ = call(
        "register", path, "--name", "scans", "--unit", "patient", "--hold-out", "0.2",
        "--lifetime-epsilon", "20", capsys=capsys,
    )  # fmt: skip
    assert code == 0
    assert "16 units (each a patient)" in out
    code, out, _ = call(
        "generate", path, "--unit", "patient", "--epsilon", "8", "--batch", "8",
        "--delta", "1e-5", *TINY, capsys=capsys,
    )  # fmt: skip
    assert code == 0, out
    run = folder / "runs" / "scans-psg-eps8"
    assert {p.name for p in (run / "release").iterdir()} == {
        "synthetic.safetensors", "contact_sheet.png", "README.md", "certificate.json",
    }  # fmt: skip
    assert (run / "private").stat().st_mode & 0o077 == 0
    assert all(d.stat().st_mode & 0o055 == 0o055 for d in (run.parent, run, run / "release"))
    certificate = json.loads((run / "release" / "certificate.json").read_text())
    assert certificate["guarantee"]["unit"] == "patient"
    assert certificate["data_set"]["public_facts"]["units"] == 16
    code, out, _ = call("verify", run, "--ledger", capsys=capsys)
    assert code == 0
    assert "the ledger knows it" in out
    code, out, _ = call("evaluate", run, "--epochs", "3", "--width", "4", capsys=capsys)
    assert code == 0
    assert "hold-out of scans" in out
    (measured,) = json.loads((run / "private" / "metrics.json").read_text())["utility"]
    assert measured["test_images"] == 12
    code, out, _ = call("ledger", capsys=capsys)
    assert "real records read for evaluation 1 times" in out
    assert "of the limit of 20 is used up (Rényi filter)" in out
    assert 8 < certificate["data_set"]["composed_total"]["lifetime_spent"] < 20
    code, _, err = call(
        "generate", path, "--unit", "patient", "--epsilon", "18", "--batch", "8", *TINY,
        capsys=capsys,
    )  # fmt: skip
    assert code == 3
    assert "lifetime budget" in err
    assert not (folder / "runs" / "scans-psg-eps18.partial").exists()


def test_default_names_are_numbered_and_quiet_is_quiet(folder, capsys):
    for name in ("digits-psg-eps10", "digits-psg-eps10-2"):
        code, out, err = call("generate", "digits", "--quiet", *TINY, capsys=capsys)
        assert code == 0, err
        assert out.strip().count("\n") == 0
        assert f"runs/{name}/release" in out


def test_json_lines(folder, capsys):
    code, out, _ = call("generate", "digits", "--json", *TINY, capsys=capsys)
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {e["event"] for e in events} == {"message", "progress", "result"}
    last = [e for e in events if e["event"] == "progress"][-1]
    assert (last["done"], last["total"]) == (4, 4)
    assert 9.9 < last["epsilon_spent"] <= 10
    assert events[-1]["epsilon"] <= 10
    code, out, _ = call("verify", events[-1]["directory"], "--json", capsys=capsys)
    assert json.loads(out)["recomputed_epsilon"] <= 10
    code, out, _ = call("generate", "nowhere.npz", "--json", capsys=capsys)
    assert code == 2
    assert json.loads(out)["event"] == "error"


def test_settings_from_toml_and_flags_that_win(folder, capsys):
    (folder / "run.toml").write_text(
        'method = "psg"\n'
        "epsilon = 5\nrounds = 1\nouter = 1\nbatches = 2\nimages-per-class = 3\n"
        'accountant = "renyi"\n'
    )
    code, _, err = call(
        "generate",
        "digits",
        "--config",
        "run.toml",
        "--epsilon",
        "8",
        "--out",
        "run",
        capsys=capsys,
    )
    assert code == 0, err
    certificate = json.loads((folder / "run" / "release" / "certificate.json").read_text())
    assert certificate["guarantee"]["target_epsilon"] == 8
    assert certificate["method"]["settings"]["images_per_class"] == 3
    assert certificate["releases"][0]["count"] == 2
    (folder / "run.toml").write_text("roundz = 1\n")
    code, _, err = call("generate", "digits", "--config", "run.toml", capsys=capsys)
    assert code == 2
    assert "roundz" in err


def test_noise_from_a_cipher_is_certified_and_not_dropped_on_resume(folder, capsys, monkeypatch):
    pytest.importorskip("cryptography")
    few = (*TINY, "--out", "run")
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", lambda self: True)
        assert call("generate", "digits", *few, "--secure-noise", capsys=capsys)[0] != 0
    code, _, err = call("generate", "digits", *few, "--resume", capsys=capsys)
    assert code == 2
    assert "repeat the command that started it" in err
    code, _, err = call("generate", "digits", *few, "--secure-noise", "--resume", capsys=capsys)
    assert code == 0, err
    certificate = json.loads((folder / "run" / "release" / "certificate.json").read_text())
    assert certificate["guarantee"]["randomness"] == "AES-256-CTR"
    code, _, _ = call("report", "run", "--out", "page.html", capsys=capsys)
    assert code == 0
    assert "AES-256-CTR" in (folder / "page.html").read_text()


def test_plan_times_the_cipher(folder, capsys):
    pytest.importorskip("cryptography")
    asked = ("plan", "--method", "psg", "--records", "600", "--steps", "3", "--json")
    code, out, err = call(*asked, "--delta", "1e-4", "--secure-noise", capsys=capsys)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    timed = {row["generator"]: float(row["milliseconds"]) for row in rows if "generator" in row}
    assert set(timed) == {"Philox", "AES-256-CTR"}
    assert min(timed.values()) > 0


def test_plan_prints_both_accountants_and_the_tail(folder, capsys):
    code, out, _ = call(
        "plan", "--method", "psg", "--records", "60000", "--batch", "256", "--steps", "20000",
        "--epsilon", "1", "--delta", "1e-5", "--json", capsys=capsys,
    )  # fmt: skip
    rows = [json.loads(line) for line in out.splitlines()]
    noise = {r["accountant"]: float(r["noise multiplier"]) for r in rows if "accountant" in r}
    assert code == 0
    assert noise["PLD"] == pytest.approx(2.369, abs=0.01)
    assert noise["Rényi"] == pytest.approx(2.553, abs=0.01)
    tail = next(r for r in rows if "accountant" in r)
    assert 0 < float(tail["bound on that tail"]) <= float(tail["delta for the sampler's tail"])


def test_plan_tells_how_far_sums_exceed_their_noise(folder, capsys):
    code, out, _ = call(
        "plan", "--method", "dp-merf", "--records", "60000", "--epsilon", "1", "--json",
        capsys=capsys,
    )  # fmt: skip
    rows = [json.loads(line) for line in out.splitlines()]
    noise = next(float(r["noise multiplier"]) for r in rows if r.get("accountant") == "PLD")
    (block,) = [r for r in rows if "block" in r]
    assert code == 0
    # 6000 records of norm 1 in a class, against noise in 10 000 coordinates
    assert float(block["signal to noise, at most"]) == pytest.approx(6000 / (noise * 100), rel=0.01)


def test_methods_lists_settings_with_their_meaning(capsys):
    _, out, _ = call("methods", capsys=capsys)
    assert "psg" in out
    _, out, _ = call("methods", "psg", "--json", capsys=capsys)
    rows = [json.loads(line) for line in out.splitlines()]
    assert any(row.get("setting") == "clip_norm" and row["meaning"] for row in rows)


def spoil(folder: Path, **changes) -> Path:
    return npz(folder, "bad.npz", **changes)


def corrupt(folder: Path) -> Path:
    path = npz(folder, "bad.npz")
    path.write_bytes(path.read_bytes()[:200])
    return path


BAD = {
    "corrupt npz": (lambda f: [corrupt(f)], "cannot be read as .npz"),
    "label outside range": (
        lambda f: [spoil(f, labels=np.full(60, 9)), "--classes", "3"],
        "outside 0 to 2",
    ),
    "NaN pixels": (lambda f: [spoil(f, images=np.full((60, 8, 8), np.nan))], "NaN"),
    "fewer units than the batch": (
        lambda f: [npz(f), "--method", "psg", "--batch", "61"],
        "lower the batch",
    ),
    "epsilon zero": (lambda f: [npz(f), "--epsilon", "0"], "epsilon is 0"),
    "epsilon negative": (lambda f: [npz(f), "--epsilon", "-3"], "epsilon is -3"),
    "epsilon no number": (lambda f: [npz(f), "--epsilon", "ten"], "ten"),
    "delta too large": (lambda f: [npz(f), "--delta", "0.1"], "less than 1/N0"),
    "no such file": (lambda f: [f / "nowhere.npz"], "does not exist"),
    "no such method": (lambda f: [npz(f), "--method", "gan"], "no method 'gan'"),
    "no such preset": (lambda f: [npz(f), "--preset", "finest"], "no preset 'finest'"),
    "no such option": (lambda f: [npz(f), "--epsilonn", "1"], "--epsilon"),
    "no such unit": (lambda f: [npz(f), "--unit", "nurse"], "no column or array 'nurse'"),
    "nothing to resume": (lambda f: [npz(f), "--resume"], "no unfinished run"),
    "existing output": (lambda f: [npz(f), "--out", f], "exists already"),
    "output below a file": (lambda f: [npz(f), "--out", npz(f) / "run"], "cannot write"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(name, folder, capsys):
    arguments, message = BAD[name]
    given = arguments(folder)
    before = sorted(p.name for p in folder.iterdir())
    code, _, err = call("generate", *given, capsys=capsys)
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert message in err
    left = {p.name for p in folder.iterdir()} - set(before) - {
        "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.sqlite.head", "runs",
    }  # fmt: skip
    assert not left
    assert not list((folder / "runs").glob("*")) if (folder / "runs").exists() else True
    if (folder / "ledger.sqlite").exists():
        assert not ledgers.Ledger(folder / "ledger.sqlite").charged_runs(1)


def test_a_large_delta_can_be_allowed(folder, capsys):
    code, _, err = call(
        "generate", npz(folder), "--delta", "0.1", "--allow-large-delta", "--out", "run", *TINY,
        capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    certificate = json.loads((folder / "run" / "release" / "certificate.json").read_text())
    assert certificate["guarantee"]["is_delta_large"] is True


def test_a_read_only_ledger_is_refused(folder, capsys):
    path = folder / "readonly.sqlite"
    ledgers.Ledger(path).close()
    path.chmod(0o400)
    code, _, err = call("generate", npz(folder), "--ledger", path, capsys=capsys)
    assert code == 2
    assert "read-only" in err
    assert not (folder / "runs").exists()


def fill_disk(monkeypatch, after: int) -> None:
    """Let the disk be full from the `after`-th synced file on."""
    synced = {"count": 0}
    original = os.fsync

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            return original(descriptor)
        synced["count"] += 1
        if synced["count"] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_at_the_start_leaves_nothing(folder, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        fill_disk(patch, after=0)
        code, _, err = call("generate", npz(folder), "--out", "run", *TINY, capsys=capsys)
    assert code == 2
    assert "no space left" in err
    assert err.count("\n") == 1
    assert not (folder / "run").exists()
    assert not (folder / "run.partial").exists()
    assert not ledgers.Ledger(folder / "ledger.sqlite").charged_runs(1)


def test_a_full_disk_at_the_end_loses_nothing(folder, capsys, monkeypatch):
    """Settings and the committed block fit, the released files do not: resume finishes."""
    path = npz(folder)
    with monkeypatch.context() as patch:
        fill_disk(patch, after=3)
        code, _, err = call("generate", path, "--out", "run", *TINY, capsys=capsys)
    assert code == 2
    assert "no space left" in err
    assert not (folder / "run").exists()
    assert not list((folder / "run.partial").rglob(".tmp-*"))
    code, _, err = call("generate", path, "--out", "run", "--resume", *TINY, capsys=capsys)
    assert code == 0, err
    code, _, _ = call("verify", "run", "--ledger", capsys=capsys)
    assert code == 0
    assert len(ledgers.Ledger(folder / "ledger.sqlite").charged_runs(1)) == 1


def test_an_unfinished_run_is_not_overwritten(folder, capsys):
    (folder / "run.partial").mkdir()
    code, _, err = call("generate", npz(folder), "--out", "run", *TINY, capsys=capsys)
    assert code == 2
    assert "--resume" in err


def test_a_changed_data_set_is_refused(folder, capsys):
    path = npz(folder)
    assert call("register", path, capsys=capsys)[0] == 0
    npz(folder, labels=np.zeros(60, int) + 1)
    code, _, err = call("generate", path, *TINY, capsys=capsys)
    assert code == 2
    assert "--new-version-of scans" in err
    code, _, err = call("generate", path, "--new-version-of", "scans", *TINY, capsys=capsys)
    assert code == 0, err


def test_a_run_on_declared_classes_evaluates_on_its_hold_out(folder, capsys):
    path = npz(folder)
    shared = [path, "--classes", "4", "--hold-out", "0.2", "--out", "run"]
    assert call("generate", *shared, *TINY, capsys=capsys)[0] == 0
    code, out, err = call("evaluate", "run", "--epochs", "2", "--width", "4", capsys=capsys)
    assert code == 0, err
    assert "hold-out of scans" in out


def test_a_new_version_can_be_resumed(folder, capsys, monkeypatch):
    path = npz(folder)
    assert call("register", path, capsys=capsys)[0] == 0
    npz(folder, labels=np.zeros(60, int) + 1)
    command = ["generate", path, "--new-version-of", "scans", "--out", "run", *TINY]
    with monkeypatch.context() as patch:
        fill_disk(patch, after=3)
        assert call(*command, capsys=capsys)[0] == 2
    code, _, err = call(*command, "--resume", capsys=capsys)
    assert code == 0, err


def test_verify_says_what_is_wrong(folder, capsys):
    assert call("generate", "digits", "--out", "run", *TINY, capsys=capsys)[0] == 0
    card = folder / "run" / "release" / "README.md"
    card.write_text(card.read_text() + "!")
    code, _, err = call("verify", "run", capsys=capsys)
    assert code == 5
    assert "README.md" in err
    assert call("verify", folder / "nowhere", capsys=capsys)[0] == 2
    (folder / "empty").mkdir()
    assert call("verify", folder / "empty", capsys=capsys)[0] == 5
