"""One process against two, on digits: the same guarantee, and an accuracy that no test tells apart.

Writes docs/results/processes.{json,md}.

    python benchmarks/processes.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from scipy.stats import ttest_ind

import understudy
from common import RESULTS, commit, device_name

SEEDS = range(5)


def measure(processes: int, seed: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launcher = [sys.executable, "-m"]
        if processes > 1:
            launcher += ["torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(processes), "-m"]
        command = [
            *launcher, "understudy", "generate", "digits", "--method", "psg",
            "--epsilon", "10", "--device", "cpu",
            "--seed", str(seed), "--out", str(folder / "run"), "--ledger", str(folder / "ledger"),
            "--quiet",
        ]  # fmt: skip
        threads = str(max(1, torch.get_num_threads() // processes))
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": threads})
        certificate = understudy.load_result(folder / "run").certificate
        (accuracy,) = understudy.evaluate(folder / "run", seeds=2, epochs=300)
    return {
        "processes": processes,
        "seed": seed,
        "epsilon": certificate.epsilon,
        "releases": certificate.content["releases"][0]["made"],
        "accuracy": accuracy.mean,
    }


def table(found: dict) -> str:
    lines = [
        "# One process against two",
        "",
        "Written by `benchmarks/processes.py`: PSG on digits, epsilon 10, default settings, five "
        "seeds each; two evaluation networks of 300 epochs per set. Batches and noise are secret "
        f"and differ from run to run. {found['device']}, commit {found['commit']}.",
        "",
        "| processes | epsilon | releases | accuracy by seed, % | mean |",
        "|---|---|---|---|---|",
    ]
    for processes in (1, 2):
        runs = [run for run in found["runs"] if run["processes"] == processes]
        each = ", ".join(f"{100 * run['accuracy']:.1f}" for run in runs)
        lines.append(
            f"| {processes} | {', '.join(sorted({format(r['epsilon'], '.4f') for r in runs}))} "
            f"| {', '.join(sorted({str(r['releases']) for r in runs}))} | {each} "
            f"| {100 * fmean(run['accuracy'] for run in runs):.1f} |"
        )
    lines += ["", f"Welch's t-test of equal means: p = {found['p']:.2f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    runs = [measure(processes, seed) for seed in SEEDS for processes in (1, 2)]
    groups = ([r["accuracy"] for r in runs if r["processes"] == n] for n in (1, 2))
    p = float(ttest_ind(*groups, equal_var=False).pvalue)
    found = {"runs": runs, "p": p, "device": device_name(), "commit": commit()}
    (RESULTS / "processes.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "processes.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
