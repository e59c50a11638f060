"""Kill commands at random moments, go on, and count what was lost: docs/results/kills.{json,md}.

Half of the kills fall at a moment of the clock, half right before or after a sync to disk, where
there is most to lose; one in four is a SIGTERM. Commands are forked from a process that has
imported everything, so that kills fall into work.

    python benchmarks/kills.py [--kills 200] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch.func imports it at first use, which takes seconds

import understudy
from common import RESULTS, commit, device_name
from understudy import job
from understudy.cli.main import main as command_line
from understudy.privacy import safekeeping
from understudy.privacy.curator import Pace
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Plan
from understudy.runs import RunDirectory, partial
from understudy.synthetic import SyntheticSet

MOST_IN_A_ROW = 3
EPSILON = "5"
GUARANTEE = ["--epsilon", EPSILON, "--delta", "1e-3", "--accountant", "renyi", "--device", "cpu"]
PSG = ["--method", "psg", "--rounds", "6", "--outer", "2", "--batches", "2", "--inner", "2",
       "--width", "4", "--images-per-class", "2", "--batch", "20"]  # fmt: skip
REHEARSAL = ["--method", "rehearsal", "--samples", "20", "--networks", "3", "--width", "4",
             "--hidden", "2", "--refine-steps", "30", "--refine-batch", "10", "--match-steps", "0",
             "--teacher-steps", "5", "--taught", "10", "--images-per-class", "200"]  # fmt: skip
MERF = ["--method", "dp-merf", "--steps", "40", "--batch", "6", "--hidden", "8", "--features", "20",
        "--images-per-class", "3", "--count-ratio", "2"]  # fmt: skip
SGD = ["--steps", "30", "--batch", "20", "--width", "4"]
WGAN = ["--method", "gs-wgan", "--steps", "12", "--batch", "6", "--width", "4", "--critics", "5",
        "--asked", "2.5", "--critic-width", "2", "--warm-up", "2",
        "--images-per-class", "3"]  # fmt: skip
CURVE = ["--curve.seeds", "1", "--curve.epochs", "5", "--curve.width", "4"]
READING = ("evaluate", "continual")
"""Commands that read real records, and must say so in the ledger each time."""
KINDS = ("generate", "train-classifier", "generate (ensemble)", "continual", "evaluate", "report",
         "export", "sample")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    is_killed: bool
    code: int
    said: str


@dataclass
class Killer:
    """Starts commands and ends them too early, as long as there are kills left."""

    left: int
    chance: random.Random
    log: Path
    seconds: dict[str, float] = field(default_factory=dict)
    syncs: dict[str, int] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    terms: Counter[str] = field(default_factory=Counter)

    def whole(self, kind: str, tokens: list[str]) -> Outcome:
        """Run a command to its end, to know how long it takes and how often it syncs."""
        counted, fsync = 0, os.fsync

        def count(descriptor: int) -> None:
            nonlocal counted
            counted += 1
            fsync(descriptor)

        os.fsync, started = count, time.perf_counter()
        try:
            command_line(tokens)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os.fsync = fsync
        self._took(kind, time.perf_counter() - started)
        self.syncs[kind] = counted
        return Outcome(False, code, "")

    def _took(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = min(seconds, self.seconds.get(kind, seconds))

    def __call__(self, kind: str, tokens: list[str], *, spare: bool) -> Outcome:
        """Run a command, and kill it unless it is to be spared or is faster."""
        spare = spare or not self.left
        how = signal.SIGTERM if self.chance.random() < 0.25 else signal.SIGKILL
        at_sync = not spare and self.chance.random() < 0.5
        # Faster than the first time, it commits less often: hence half of that many syncs.
        sync = self.chance.randrange(max(1, self.syncs[kind] // 2)) if at_sync else -1
        started, child = time.perf_counter(), os.fork()
        if child == 0:
            self._run(tokens, sync=sync, is_before=self.chance.random() < 0.5, how=how)
        moment = self.chance.uniform(0, 1.1 * self.seconds[kind])
        if not spare and not at_sync:
            time.sleep(moment)
            os.kill(child, how)  # a child that ended is not reaped yet: its number is still its own
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        is_killed = status in (-how, 128 + how)
        if is_killed:
            self.left -= 1
            self.kills[kind] += 1
            self.terms[kind] += how == signal.SIGTERM
        elif status == 0:
            self._took(kind, time.perf_counter() - started)
        return Outcome(is_killed, status, self.log.read_text())

    def _run(self, tokens: list[str], *, sync: int, is_before: bool, how: signal.Signals) -> None:
        """Be the child: a command whose output goes to a file, killed at its own sync if asked."""
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        count, fsync = -1, os.fsync

        def counted(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == sync and is_before:
                os.kill(os.getpid(), how)
            fsync(descriptor)
            if count == sync and not is_before:
                os.kill(os.getpid(), how)

        os.fsync = counted
        code = 1
        try:
            command_line(tokens)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


@dataclass
class World:
    """A folder with private data and a ledger, and what was asked for in it."""

    folder: Path
    kill: Killer
    asked: list[Path] = field(default_factory=list)
    """Runs that must be charged, each once."""
    abandoned: list[Path] = field(default_factory=list)
    readings: Counter[str] = field(default_factory=Counter)
    """Evaluations that were started, and those that were finished."""
    problems: list[str] = field(default_factory=list)
    _verified: set[Path] = field(default_factory=set)

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.sqlite"

    def write_data(self, name: str, seed: int) -> str:
        random_numbers = np.random.default_rng(seed)
        images = random_numbers.integers(0, 256, (240, 8, 8, 1), dtype=np.uint8)
        np.savez(self.folder / name, images=images, labels=np.arange(240) % 4)
        return str(self.folder / name)

    def problem(self, what: str) -> None:
        self.problems.append(f"{self.folder.name}: {what}")

    def until_done(
        self, kind: str, tokens: Callable[[], list[str]], is_done: Callable[[], bool]
    ) -> Outcome:
        """Repeat a command until it is done or refuses; look at everything after each kill."""
        kills = self.kill.chance.randint(1, MOST_IN_A_ROW)
        for attempt in range(kills + 1):
            outcome = self.kill(kind, tokens(), spare=attempt == kills)
            self.readings["started"] += kind in READING
            if "Traceback" in outcome.said:
                self.problem(f"{kind} ended with a traceback: {outcome.said[-300:]}")
            self.look()
            if not outcome.is_killed or is_done():
                break
        self.readings["finished"] += kind in READING and outcome.code == 0
        if outcome.code not in (0, 2) and not outcome.is_killed:
            self.problem(f"{kind} ended with {outcome.code}: {outcome.said[-300:]}")
        return outcome

    def run(self, kind: str, place: Path, tokens: list[str]) -> bool:
        """Make a run at `place`; say whether it is finished, not abandoned."""
        command, *rest = tokens
        fixed = [command, str(self.folder / "data.npz"), *rest, *GUARANTEE, "--out", str(place),
                 "--ledger", str(self.ledger), "--lifetime-epsilon", "1000", "--hold-out", "0.2",
                 "--quiet"]  # fmt: skip

        def again() -> list[str]:
            return fixed + ["--resume"] * (partial(place).exists() or place.exists())

        outcome = self.until_done(kind, again, place.exists)
        self.asked.append(place)
        if not place.exists():
            self.abandoned.append(place)
            if "this run was cut off" not in outcome.said:
                self.problem(f"{place.name} was given up: {outcome.said[-300:]}")
        return place.exists()

    def after_run(self, kind: str, tokens: list[str], made: Path | None = None) -> None:
        outcome = self.until_done(kind, lambda: tokens, lambda: made is not None and made.exists())
        if outcome.code and not outcome.is_killed:
            self.problem(f"{kind} failed: {outcome.said[-300:]}")

    def look(self) -> None:
        """Whatever has its name on disk must be whole, at any moment."""
        for what, error in self._unreadable():
            self.problem(f"{what} cannot be read: {error!r}")

    def _unreadable(self) -> Iterator[tuple[str, Exception]]:
        for path in sorted(self.folder.iterdir()):
            try:
                self._read(path)
            except Exception as error:
                yield path.name, error

    def _read(self, path: Path) -> None:
        if path == self.ledger:
            with closing(Ledger(path)) as ledger:
                safekeeping.check(ledger, [self.folder])
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")
        elif path.suffix == ".safetensors":
            SyntheticSet.load(path)
        elif path.name == "continual":
            for stage in path.glob("stage-?"):
                self._verify(stage)
            for file in path.rglob("*.json"):
                json.loads(file.read_bytes())
        elif (path / "release").is_dir() and path.suffix != ".partial":
            RunDirectory(path).metrics()
            self._verify(path)
        elif (path / "synthetic.npz").exists() and path.suffix != ".exporting":
            assert len(np.load(path / "synthetic.npz")["labels"])
            assert (path / "certificate.json").exists()

    def _verify(self, run: Path) -> None:
        """Verify a run, once: nobody writes to what is released."""
        if run not in self._verified:
            understudy.verify(run, ledger=True)
            self._verified.add(run)

    def settle(self) -> None:
        """Compare the ledger with what was asked for; say what is lost and what counted twice."""
        with closing(Ledger(self.ledger)) as ledger:
            rows = [row for row in ledger.rows("SELECT * FROM runs") if row["state"] != "cancelled"]
            by_id = {row["id"]: row for row in rows}
            made = {
                row["id"]: sum(sum(b.releases.values()) for b in ledger.blocks(row["id"]))
                for row in rows
            }
            readings = len(ledger.rows("SELECT * FROM disclosures"))
        for place in self.asked:
            run = by_id.pop(RunDirectory(place).settings()["run"], None)
            if run is None:
                self.problem(f"LOST: {place.name} is not charged")
                continue
            planned = Plan.from_json(json.loads(run["plan"])).total
            is_abandoned = place in self.abandoned
            if made[run["id"]] != planned and not is_abandoned:
                self.problem(f"LOST: {place.name} has {made[run['id']]} of {planned} releases")
            if (run["state"] == "finished") == is_abandoned or run["epsilon"] > float(EPSILON):
                self.problem(f"{place.name} is {run['state']} at epsilon {run['epsilon']}")
        for run_id in by_id:
            self.problem(f"TWICE: run {run_id} is charged, but was not asked for")
        if not self.readings["finished"] <= readings <= self.readings["started"]:
            self.problem(f"{readings} readings of real records for {dict(self.readings)}")


def live(world: World) -> None:
    """Do everything once: runs of each kind, what comes after them, and stages."""
    folder, chance = world.folder, world.kill.chance
    world.write_data("data.npz", chance.randrange(2**32))
    world.run("generate", folder / "psg", ["generate", *PSG])
    world.run("generate", folder / "merf", ["generate", *MERF])
    world.run("generate", folder / "rehearsal", ["generate", *REHEARSAL])
    world.run("train-classifier", folder / "sgd", ["train-classifier", *SGD])
    for number in range(2):
        world.run("generate (ensemble)", folder / f"wgan-{number}", ["generate", *WGAN])
    run, ledger = str(folder / "psg"), ["--ledger", str(world.ledger)]
    world.after_run("evaluate", [
        "evaluate", run, "--models", "mlp,gaussian-nb", "--seeds", "2", "--epochs", "3",
        "--missing", *ledger, "--device", "cpu", "--quiet",
    ])  # fmt: skip
    page, form, drawn = (folder / name for name in ("page.html", "npz", "drawn.safetensors"))
    world.after_run("report", ["report", run, "--ledger", "--out", str(page)], page)
    world.after_run("export", ["export", run, "--to", "npz", "--out", str(form)], form)
    world.after_run(
        "sample", ["sample", str(folder / "merf"), "--count", "20", "--out", str(drawn)], drawn
    )
    world.settle()


def live_in_stages(world: World) -> None:
    """Learn in two stages; each is a run of its own."""
    data = world.write_data("data.npz", world.kill.chance.randrange(2**32))
    test = world.write_data("test.npz", 1)
    out = world.folder / "continual"
    world.after_run("continual", [
        "continual", data, "--stages", "0,1", "2,3", "--test", test, "--out", str(out), *PSG,
        *GUARANTEE, *CURVE, "--ledger", str(world.ledger), "--quiet",
    ])  # fmt: skip
    world.asked += [out / "stage-1", out / "stage-2"]
    world.settle()


def warm_up(killer: Killer, folder: Path) -> None:
    """Run every kind of command once here: imports, caches, and how long they take."""

    class Patient(Killer):
        def __call__(self, kind: str, tokens: list[str], *, spare: bool) -> Outcome:
            return killer.whole(kind, tokens)

    for act, name in ((live, "warm"), (live_in_stages, "warm-stages")):
        world = World(folder / name, Patient(0, killer.chance, killer.log))
        world.folder.mkdir()
        act(world)
        if world.problems:
            raise SystemExit("\n".join(["without any kill:", *world.problems]))


def table(found: dict[str, Any]) -> str:
    problems = found["problems"]
    lines = [
        "# Killed at random moments",
        "",
        f"Written by `benchmarks/kills.py`: {found['kills']} kills of commands on a tiny private "
        "set, half of them at a random moment, half right before or after a sync to disk; after "
        "each kill the ledger is checked and every output read, then the command is repeated until "
        "it is done. At the end the ledger is compared with what was asked for. A run with an "
        "ensemble that was killed after its first release is abandoned, and stays charged."
        f" {found['device']}, commit {found['commit']}, {found['seconds']:.0f} seconds.",
        "",
        "| command | kills | of these SIGTERM |",
        "|---|---|---|",
        *(
            f"| {kind} | {found['by_command'][kind]['kills']} "
            f"| {found['by_command'][kind]['sigterm']} |"
            for kind in KINDS
        ),
        "",
        "| asked for | |",
        "|---|---|",
        f"| runs | {found['runs']} |",
        f"| of these abandoned, and charged | {found['abandoned']} |",
        f"| charges lost | {sum('LOST' in one for one in problems)} |",
        f"| charges counted twice | {sum('TWICE' in one for one in problems)} |",
        f"| outputs that could not be read | {sum('cannot be read' in one for one in problems)} |",
        f"| anything else unexpected | {sum(_is_other(one) for one in problems)} |",
    ]
    return "\n".join(lines) + "\n"


def _is_other(problem: str) -> bool:
    return not any(word in problem for word in ("LOST", "TWICE", "cannot be read"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else time.time_ns() % 2**32
    torch.set_num_threads(1)
    # A block for every few steps, so that kills fall into many of them.
    job.Pace = lambda **options: Pace(**{"seconds": 0.02, **options})  # type: ignore[misc, assignment]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["UNDERSTUDY_HOME"] = str(folder / "home")
        killer = Killer(asked.kills, random.Random(seed), folder / "log.txt")
        warm_up(killer, folder)
        worlds: list[World] = []
        while killer.left:
            act = live_in_stages if len(worlds) % 2 else live
            worlds.append(World(folder / str(len(worlds)), killer))
            worlds[-1].folder.mkdir()
            act(worlds[-1])
            print(f"{asked.kills - killer.left} kills, {len(worlds)} worlds", flush=True)
    found = {
        "kills": sum(killer.kills.values()),
        "seed": seed,
        "by_command": {
            kind: {"kills": killer.kills[kind], "sigterm": killer.terms[kind]} for kind in KINDS
        },
        "runs": sum(len(world.asked) for world in worlds),
        "abandoned": sum(len(world.abandoned) for world in worlds),
        "problems": [problem for world in worlds for problem in world.problems],
        "seconds": round(time.perf_counter() - started, 1),
        "device": device_name(),
        "commit": commit(),
    }
    (asked.out / "kills.json").write_text(json.dumps(found, indent=1) + "\n")
    (asked.out / "kills.md").write_text(table(found))
    print(table(found), *found["problems"], sep="\n")
    sys.exit(bool(found["problems"]))


if __name__ == "__main__":
    main()
