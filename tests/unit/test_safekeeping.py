"""A ledger that is damaged, lost, or put back to an older state; copies of it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from door import a_vault, linear_loss, linear_params, open_curator, some_images
from understudy.cli.main import main
from understudy.errors import LedgerError, OutputExists
from understudy.privacy import database, safekeeping
from understudy.privacy.ledger import Ledger
from understudy.privacy.mark import Mark, mark_beside, mark_file
from understudy.privacy.registration import RegistrationTerms, register


@pytest.fixture
def used(ledger, tmp_path) -> Ledger:
    """A ledger with a limited data set and a run that has released."""
    vault = a_vault(ledger, some_images(60), lifetime_epsilon=30.0)
    curator = open_curator(ledger, tmp_path, vault=vault, run_id="run")
    curator.gradient(linear_loss, linear_params(), clip_norm=1.0)
    curator.checkpoint(1, {"x": linear_params()["bias"]})
    curator.made()
    return ledger


def edit(path: Path, statement: str, *values) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement, values)
    connection.close()


def spend(path: Path, purpose: str) -> None:
    book = Ledger(path)
    book.disclose(None, what="test", purpose=purpose)
    book.close()


def linked(place: Path, name: str, to: Path) -> Path:
    """Make a link in a folder of its own."""
    place.mkdir(exist_ok=True)
    (place / name).symlink_to(to)
    return place / name


def copied(path: Path) -> Path:
    """Copy the file alone, as a careless custodian would."""
    return Path(shutil.copy(path, path.with_name("careless.sqlite")))


def test_a_ledger_in_order_is_found_so(used):
    found = safekeeping.check(used)
    assert (found.data_sets, found.runs, found.lost) == (1, 1, 0)
    assert found.entries == used.latest().number == mark_beside(used.path).number


@pytest.mark.parametrize(
    "edited",
    [
        "UPDATE runs SET epsilon = epsilon / 2",
        "UPDATE runs SET state = 'cancelled'",
        "DELETE FROM blocks",
        "UPDATE data_sets SET lifetime_epsilon = 1000",
        "INSERT INTO disclosures VALUES (7, NULL, 'w', 'p', 0.0)",
        "UPDATE meta SET value = zeroblob(32) WHERE key = 'key'",
    ],
)
def test_a_row_changed_by_another_hand_shows_at_once(used, edited):
    used.close()
    edit(used.path, edited)
    with pytest.raises(LedgerError, match=r"not what was written.*understudy ledger restore"):
        Ledger(used.path)


@pytest.mark.parametrize(
    "edited",
    [
        "DELETE FROM images WHERE tag IN (SELECT tag FROM images LIMIT 1)",
        "DELETE FROM history WHERE number = 2",
        "UPDATE history SET head = zeroblob(16) WHERE number = 3",
    ],
)
def test_the_rest_shows_when_it_is_checked(used, edited):
    used.close()
    edit(used.path, edited)
    mark_file(used.path).unlink()
    with pytest.raises(LedgerError, match="is not a usable ledger"):
        edit(used.path, "DELETE FROM history WHERE number > 3")
        safekeeping.check(Ledger(used.path))


def test_rules_are_checked_beyond_the_sums(used):
    """A fault of our own would carry the sums forward."""
    with used.transaction() as execute:
        execute("UPDATE blocks SET releases = ?", ('{"gradient": 9}',))
    with pytest.raises(LedgerError, match="more than was planned"):
        safekeeping.check(used)
    with used.transaction() as execute:
        execute("UPDATE blocks SET number = 4")
    with pytest.raises(LedgerError, match="a block of run run is missing"):
        safekeeping.check(used)


def test_more_charged_than_the_limit_shows(used):
    with used.transaction() as execute:
        execute("UPDATE data_sets SET lifetime_epsilon = 0.5")
    with pytest.raises(LedgerError, match="than its lifetime allows"):
        safekeeping.check(used)


def test_a_flipped_bit_anywhere_is_refused_or_harmless(used, tmp_path):
    """No flip of a bit is ever taken for another history, on any page."""
    expected = [tuple(row) for row in used.rows("SELECT * FROM runs")]
    used.close()
    content = used.path.read_bytes()
    refused = 0
    filled = [place for place, byte in enumerate(content) if byte][18:]  # most of it is empty
    for place in filled[:: len(filled) // 100]:
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        used.path.write_bytes(bytes(damaged))
        try:
            book = Ledger(used.path)
            assert [tuple(row) for row in book.rows("SELECT * FROM runs")] == expected
            book.close()
        except LedgerError:
            refused += 1
        for ending in ("-wal", "-shm"):
            used.path.with_name(used.path.name + ending).unlink(missing_ok=True)
    assert refused > 20


def test_a_truncated_ledger_is_refused_and_a_copy_put_back(used, tmp_path, capsys):
    copy = tmp_path / "copies" / "ledger.sqlite"
    copy.parent.mkdir()
    until = safekeeping.backup(used, copy)
    assert copy.stat().st_mode & 0o077 == 0
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]
    rows = [tuple(row) for row in used.rows("SELECT * FROM runs")]
    used.close()
    used.path.write_bytes(used.path.read_bytes()[:5000])
    with pytest.raises(LedgerError, match="not a usable ledger .* `understudy ledger restore"):
        Ledger(used.path)
    done = safekeeping.restore(copy, used.path)
    assert (done.latest, done.lost, done.is_compared) == (until, 0, True)
    assert done.former.stat().st_size == 5000
    assert [tuple(row) for row in Ledger(used.path).rows("SELECT * FROM runs")] == rows
    safekeeping.check(Ledger(used.path))


def test_an_older_copy_in_its_place_is_known(used):
    used.close()
    careless, before = copied(used.path), used.path.read_bytes()
    spend(used.path, "later")
    used.path.write_bytes(before)
    with pytest.raises(LedgerError, match="put back to an older state: it ends at entry"):
        Ledger(used.path)
    spend(careless, "another life")
    shutil.copy(careless, used.path)
    with pytest.raises(LedgerError, match="is not the one that .* has seen: they differ at entry"):
        Ledger(used.path)


def test_a_lost_log_is_known(used):
    """The file without what SQLite keeps beside it is an older state."""
    used.close()
    keeps_log = sqlite3.connect(used.path)
    keeps_log.execute("SELECT * FROM runs").fetchone()
    spend(used.path, "in the log")
    log = used.path.with_name(f"{used.path.name}-wal")
    assert log.stat().st_size
    alone = used.path.read_bytes()
    keeps_log.close()
    used.path.write_bytes(alone)
    with pytest.raises(LedgerError, match="older state"):
        Ledger(used.path)


@pytest.mark.parametrize("content", [None, b""])
def test_a_ledger_that_is_gone_is_not_begun_anew(used, content):
    used.close()
    used.path.unlink()
    if content is not None:
        used.path.write_bytes(content)
    with pytest.raises(LedgerError, match="understudy ledger restore"):
        Ledger(used.path)
    with pytest.raises(LedgerError):  # nor at a second try
        Ledger(used.path)


def test_an_older_copy_is_put_back_only_if_its_loss_is_accepted(used, tmp_path, capsys):
    copy = tmp_path / "copy.sqlite"
    safekeeping.backup(used, copy)
    for number in range(3):
        used.disclose(None, what="test", purpose=str(number))
    seen = used.latest()
    used.close()
    with pytest.raises(LedgerError, match="--accept-loss"):
        safekeeping.restore(copy, used.path)
    with closing(Ledger(used.path)) as book:
        assert book.latest() == seen
    done = safekeeping.restore(copy, used.path, accept_loss=True)
    assert done.lost == 3
    assert done.latest.number == seen.number + 1
    book = Ledger(used.path)
    assert safekeeping.check(book).lost == 3
    book.disclose(None, what="test", purpose="goes on")
    with pytest.raises(LedgerError, match="was lost when an older copy was put back"):
        book.confirm(seen, tmp_path)
    safekeeping.check(book)
    book.close()
    with pytest.raises(SystemExit):
        main(["ledger", "--ledger", str(used.path), "--quiet"])
    assert "3 entries are missing" in capsys.readouterr().out


def test_a_ledger_in_use_is_not_replaced(used, tmp_path):
    copy = tmp_path / "copy.sqlite"
    safekeeping.backup(used, copy)
    with pytest.raises(LedgerError, match="another process uses the ledger"):
        safekeeping.restore(copy, used.path)
    used.disclose(None, what="test", purpose="still there")


def test_what_is_no_copy_is_neither_restored_nor_overwritten(used, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("no ledger")
    with pytest.raises(OutputExists, match="no earlier copy"):
        safekeeping.backup(used, note)
    other = Ledger(tmp_path / "other.sqlite")
    other.close()
    with pytest.raises(OutputExists, match="no earlier copy"):
        safekeeping.backup(used, other.path)
    used.close()
    for copy, word in (
        (note, "not a usable ledger"),
        (other.path, "--accept-loss"),
        (tmp_path / "none", "there is no copy"),
        (used.path, "is the ledger itself"),
    ):
        with pytest.raises(LedgerError, match=word):
            safekeeping.restore(copy, used.path)
    safekeeping.check(Ledger(used.path))
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_linked_ledger_is_the_one_that_the_link_leads_to(used, tmp_path):
    """SQLite keeps its log beside the file, not beside the link."""
    link = linked(tmp_path / "elsewhere", "linked.sqlite", used.path)
    folder = linked(tmp_path / "elsewhere", "folder", tmp_path) / used.path.name
    for way in (link, folder):
        with closing(Ledger(way)) as book:
            book.disclose(None, what="test", purpose="through a link")
            copy = tmp_path / f"{way.name}.copy"
            assert safekeeping.backup(book, copy) == book.latest()
            assert mark_beside(used.path) == book.latest() == used.latest()
        with closing(Ledger(copy)) as held:
            assert [r["id"] for r in held.charged_runs(1)] == ["run"]
    assert {path.name for path in link.parent.iterdir()} == {"linked.sqlite", "folder"}


def test_a_copy_put_back_through_a_link_leaves_one_ledger(used, tmp_path):
    link = linked(tmp_path / "elsewhere", "linked.sqlite", used.path)
    copy = tmp_path / "copy.sqlite"
    until = safekeeping.backup(used, copy)
    used.disclose(None, what="test", purpose="later")
    with pytest.raises(LedgerError, match="another process uses the ledger"):
        safekeeping.restore(copy, link)
    used.close()
    with pytest.raises(LedgerError, match="--accept-loss"):
        safekeeping.restore(copy, link)
    assert safekeeping.restore(copy, link, accept_loss=True).lost == 1
    used.path.unlink()
    with pytest.raises(LedgerError, match="is gone, but"):
        Ledger(link)
    with pytest.raises(LedgerError, match="--accept-loss"):  # what was seen is beside the file
        safekeeping.restore(copy, link)
    assert safekeeping.restore(copy, link, accept_loss=True).latest.number > until.number
    assert link.is_symlink()
    assert list(link.parent.iterdir()) == [link]
    with closing(Ledger(link)) as one, closing(Ledger(used.path)) as other:
        assert one.latest() == other.latest()


def test_a_copy_under_a_linked_name_is_written_where_the_link_leads(used, tmp_path):
    kept = tmp_path / "another disk" / "copy.sqlite"
    kept.parent.mkdir()
    link = linked(tmp_path / "here", "copy.sqlite", kept)
    for _ in range(2):
        used.disclose(None, what="test", purpose="p")
        until = safekeeping.backup(used, link)
        assert link.is_symlink()
        assert safekeeping._latest(kept) == until
    itself = linked(tmp_path / "here", "itself", used.path)
    for name in (itself, used.path):
        with pytest.raises(OutputExists, match="is the ledger itself"):
            safekeeping.backup(used, name)


def test_a_log_is_read_through_a_link(used, tmp_path):
    """A copy made by hand, with its log, and named by a link."""
    place = tmp_path / "by hand"
    place.mkdir()
    for ending in ("", "-wal"):
        shutil.copy(f"{used.path}{ending}", place)
    until = used.latest()
    used.close()
    link = linked(tmp_path / "elsewhere", "copy", place / used.path.name)
    assert safekeeping.restore(link, used.path).latest == until


def test_a_link_to_nowhere_begins_no_ledger(tmp_path):
    """Its disk may not be mounted."""
    file = linked(tmp_path / "here", "ledger.sqlite", tmp_path / "disk" / "ledger.sqlite")
    folder = linked(tmp_path / "here", "folder", tmp_path / "disk")
    for path, create in ((file, True), (file, False), (folder / "ledger.sqlite", True)):
        with pytest.raises(LedgerError, match="leads to no ledger.*would not know what was spent"):
            Ledger(path, create=create)
    assert not (tmp_path / "disk").exists()
    circle = linked(tmp_path / "here", "circle", tmp_path / "here" / "circle")
    copy = tmp_path / "copy.sqlite"
    with closing(Ledger(tmp_path / "ledger.sqlite")) as book:
        safekeeping.backup(book, copy)
        for attempt in (
            lambda: Ledger(circle),
            lambda: Ledger(circle / "ledger.sqlite"),
            lambda: safekeeping.backup(book, circle),
            lambda: safekeeping.restore(copy, circle),
        ):
            with pytest.raises(LedgerError, match="cannot open .*links"):
                attempt()


def test_a_copy_is_of_one_moment_and_replaces_an_earlier_one(used, tmp_path):
    copy = tmp_path / "copy.sqlite"
    first = safekeeping.backup(used, copy)
    writer = Ledger(used.path)
    with writer.transaction() as execute:
        execute("UPDATE runs SET state = 'finished', certificate = 'c'")
        second = safekeeping.backup(used, copy)  # what is not committed is not copied
    assert second == first
    assert safekeeping.backup(used, copy).number == first.number + 1


def test_the_mark_is_never_ahead(used, monkeypatch):
    """Cut off between commit and mark, the ledger is ahead, and that is fine."""
    before = mark_beside(used.path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(used, "_testify", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        used.disclose(None, what="test", purpose="cut off")
    assert mark_beside(used.path) == before
    again = Ledger(used.path)
    assert again.latest().number == before.number + 1
    again.disclose(None, what="test", purpose="goes on")
    assert mark_beside(used.path) == again.latest()


def test_a_transaction_that_changes_nothing_has_no_entry(used):
    before = used.latest()
    register(used, some_images(60), RegistrationTerms())
    assert used.latest() == before


def test_a_mark_that_cannot_be_read_says_so(used):
    used.close()
    for content in ("{", json.dumps({"number": 1})):
        mark_file(used.path).write_text(content)
        with pytest.raises(LedgerError, match="put it back"):
            Ledger(used.path)
    mark_file(used.path).unlink()
    Ledger(used.path).close()  # as after a copy of the file alone


def test_another_process_that_holds_the_ledger_is_named(used, monkeypatch):
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.1)
    book, holder = Ledger(used.path), sqlite3.connect(used.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    for attempt in (lambda: book.disclose(None, what="t", purpose="p"), lambda: book.cancel("run")):
        with pytest.raises(LedgerError, match="another process has held the ledger"):
            attempt()
    holder.execute("ROLLBACK")
    holder.close()
    book.disclose(None, what="t", purpose="p")


def test_a_run_refuses_a_ledger_that_forgot_its_blocks(used, tmp_path):
    """Its releases would be made a second time, at the price of one."""
    with used.transaction() as execute:
        execute("DELETE FROM blocks")
    with pytest.raises(LedgerError, match="does not know of .*000000.block"):
        open_curator(used, tmp_path, vault=a_vault(used, some_images(60)), run_id="run")


def test_on_the_command_line(used, tmp_path, capsys):
    where = ["--ledger", str(used.path)]
    copy = str(tmp_path / "copy.sqlite")

    def run(*arguments) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["ledger", *arguments, *where])
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out + shown.err

    run_folder = tmp_path / "a-run" / "private"
    run_folder.mkdir(parents=True)
    (run_folder / "run.json").write_text(json.dumps({"ledger": str(used.path)}))
    (run_folder / "ledger.json").write_text(json.dumps(used.latest().to_json()))
    assert "is in order" in run("check")[1]
    assert "1 run directories compared" in run("check", str(tmp_path / "a-run"))[1]
    assert "until entry" in run("backup", copy)[1]
    seen = Mark(used.latest().number + 5, "00" * 16)
    (run_folder / "ledger.json").write_text(json.dumps(seen.to_json()))
    code, said = run("check", str(tmp_path))
    assert code == 2
    assert "put back to an older state" in said
    used.close()
    used.path.unlink()
    code, said = run("check")
    assert code == 2
    assert "is gone" in said
    assert said.count("\n") == 1
    assert "is restored" in run("restore", copy)[1]
    assert "is in order" in run("check")[1]
    assert "60 units" in run()[1]
