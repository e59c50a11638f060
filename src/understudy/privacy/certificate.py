"""The certificate: what was guaranteed, how, and for exactly which files.

`seal` is the SHA-256 of everything else in the file, so any single edit shows; `authentication` is
made with the ledger's key, so a consistent edit of certificate and files shows to the custodian.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from understudy.errors import InvalidSettings, VerificationFailed
from understudy.files import canonical_json, file_digest, parse_json, read_whole
from understudy.privacy.accounting import (
    CURVE_DELTAS,
    LIBRARY,
    RenyiFilter,
    check_cost,
    composed_epsilon,
    epsilon_curve,
    epsilon_of,
    wide_interval,
)
from understudy.privacy.calibration import EPSILON_TOLERANCE
from understudy.privacy.curator import Curator
from understudy.privacy.federation import ACCOUNTANT, RELATION, Course
from understudy.privacy.form import check_form
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Accountant, Budget, Plan, PublicFacts
from understudy.privacy.randomness import tail_delta
from understudy.privacy.registration import Registration
from understudy.text import one_line

FILE_NAME = "certificate.json"
FORMAT = 1
MOST_BYTES = 2**24
NO_LEDGER = "none: the server of a federation keeps no ledger"
AGAIN = "get the release again from whoever made it"
NOT_GUARANTEED = "do not rely on it, and ask whoever made it"


@dataclass(frozen=True)
class Certificate:
    """A parsed certificate."""

    content: dict[str, Any]

    @property
    def epsilon(self) -> float:
        """The certified epsilon; infinite without a guarantee."""
        epsilon = self.content["guarantee"]["epsilon"]
        return math.inf if epsilon is None else float(epsilon)

    @property
    def delta(self) -> float:
        """The certified delta."""
        return float(self.content["guarantee"]["delta"])

    @property
    def has_guarantee(self) -> bool:
        """Whether the set is differentially private at all."""
        return bool(self.content["guarantee"]["kind"] != "none")

    @property
    def grounds(self) -> str:
        """What the guarantee rests on where that is not a ledger: in a federation."""
        told = self.content.get("federation")
        return Course.from_json(told).in_words() if told and self.has_guarantee else ""

    def to_bytes(self) -> bytes:
        """Return the one byte string that stands for this certificate."""
        return canonical_json(self.content)


def issue(
    curator: Curator,
    *,
    registration: Registration,
    budget: Budget,
    ledger: Ledger,
    run_id: str,
    method: Mapping[str, Any],
    files: Mapping[str, bytes],
    allow_large_delta: bool = False,
) -> Certificate:
    """Certify `files` as the result of the curator's run."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "run": run_id,
        "guarantee": _guarantee(curator, budget, allow_large_delta),
        "data_set": {
            "name": registration.name,
            "relation": registration.relation,
            "lineage": registration.lineage,
            "public_facts": registration.facts.to_json(),
            "is_public_benchmark": registration.is_public_benchmark,
            "held_out_share": registration.hold_out,
            "composed_total": composed_total(ledger, registration),
        },
        "releases": _releases(curator),
        "extra_attempts": curator.extra_attempts,
        "method": dict(method),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    return _sealed(content, lambda said: ledger.mac(said).hex())


def attest(
    course: Course,
    *,
    facts: PublicFacts,
    run_id: str,
    method: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Certificate:
    """Certify `files` as the result of a federation, by what its clients told the server."""
    guarantee = _told_guarantee(course, facts)
    (line,) = course.plan.to_json()
    computed = {
        "made": course.rounds_answered,
        "bounds": None,
        "noise_multiplier": course.noise_multiplier,
    }
    content: dict[str, Any] = {
        "format": FORMAT,
        "run": run_id,
        "guarantee": guarantee,
        "data_set": {
            "name": course.data,
            "relation": RELATION,
            "lineage": None,
            "public_facts": facts.to_json(),
            "is_public_benchmark": False,
            "held_out_share": 0.0,
            "composed_total": {
                "runs": 1,
                "epsilon": guarantee["epsilon"],
                "delta": course.delta,
                "accountant": ACCOUNTANT,
            },
        },
        "releases": [line | computed],
        "extra_attempts": 0,
        "method": dict(method),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "federation": course.to_json(),
    }
    return _sealed(content, lambda _: NO_LEDGER)


def _told_guarantee(course: Course, facts: PublicFacts) -> dict[str, Any]:
    delta = course.delta
    if not course.is_private:
        reason = "a client told of no noise"
        return {"kind": "none", "reason": reason, "epsilon": None, "delta": delta}
    deltas = [d for d in CURVE_DELTAS if d < 1 / facts.units or d == delta]
    return {
        "kind": "differential privacy",
        "epsilon": course.server_epsilon,
        "target_epsilon": course.server_epsilon,
        "delta": delta,
        "delta_split": {"accounted": course.accounted, "sampler_tail": course.tail},
        "is_delta_large": delta * facts.units >= 1,
        "unit": facts.unit,
        "curve": _curve(course.plan, course.noise_multiplier, deltas, course.tail, ACCOUNTANT),
        "accountant": ACCOUNTANT,
        "library": LIBRARY,
        "randomness": "each client itself",
    }


def _sealed(content: dict[str, Any], authenticate: Callable[[bytes], str]) -> Certificate:
    content = json.loads(canonical_json(content))  # tuples become lists, once
    content["authentication"] = authenticate(canonical_json(content))
    content["seal"] = hashlib.sha256(canonical_json(content)).hexdigest()
    return Certificate(content)


def _guarantee(curator: Curator, budget: Budget, allow_large_delta: bool) -> dict[str, Any]:
    calibration, facts = curator.calibration, curator.facts
    if not curator.has_guarantee:
        is_noiseless = calibration.noise_multiplier == 0
        reason = "no noise was added" if is_noiseless else "randomness was injected by a test"
        return {"kind": "none", "reason": reason, "epsilon": None, "delta": budget.delta}
    deltas = [d for d in CURVE_DELTAS if d < 1 / facts.units or d == budget.delta]
    tail = calibration.delta_tail
    return {
        "kind": "differential privacy",
        "epsilon": calibration.epsilon,
        "target_epsilon": budget.epsilon,
        "delta": budget.delta,
        "delta_split": {"accounted": calibration.delta_accounted, "sampler_tail": tail},
        "is_delta_large": allow_large_delta and budget.delta >= 1 / facts.units,
        "unit": facts.unit,
        "curve": _curve(
            curator.plan, calibration.noise_multiplier, deltas, tail, budget.accountant
        ),
        "accountant": budget.accountant,
        "library": LIBRARY,
        "randomness": curator.generator,
    }


def _curve(
    plan: Plan, multiplier: float, deltas: Sequence[float], tail: float, accountant: Accountant
) -> list[dict[str, float]]:
    """Return epsilon at each of `deltas`, the sampler's tail included."""
    inner = [delta - tail for delta in deltas if delta > tail]
    found = epsilon_curve(plan, multiplier, inner, accountant)
    return [
        {"delta": delta + tail, "epsilon": epsilon}
        for delta, epsilon in zip(inner, found, strict=True)
    ]


def _releases(curator: Curator) -> list[dict[str, Any]]:
    made, bounds = curator.made(), curator.bounds
    return [
        line
        | {
            "made": made[line["name"]],
            "bounds": bounds[line["name"]],
            "noise_multiplier": curator.calibration.noise_multiplier * line["noise_ratio"],
        }
        for line in curator.plan.to_json()
    ]


def composed_total(ledger: Ledger, registration: Registration) -> dict[str, Any]:
    """Return what all runs charged to a data set cost together.

    One run keeps its own epsilon. Several are composed by Rényi, as if their plans had been fixed
    ahead; against a lifetime budget the filter decides, which does not assume that.
    """
    runs = ledger.charged_runs(registration.budget)
    delta = runs[0]["delta"]
    if len(runs) == 1:
        epsilon, how = runs[0]["epsilon"], runs[0]["accountant"]
    else:
        plans = [(Plan.from_json(json.loads(r["plan"])), r["noise_multiplier"]) for r in runs]
        left = delta - sum(r["delta_tail"] for r in runs)
        is_bounded = left > 0 and all(r["epsilon"] is not None for r in runs)
        epsilon, how = composed_epsilon(plans, left) if is_bounded else None, "renyi"
    total = {"runs": len(runs), "epsilon": epsilon, "delta": delta, "accountant": how}
    if registration.lifetime_epsilon is None or not registration.has_limit:
        return total
    filter_ = RenyiFilter.for_budget(registration.lifetime_epsilon, delta)
    spent = filter_.spent(sum(r["divergence"] for r in runs), delta)
    return total | {"lifetime_epsilon": registration.lifetime_epsilon, "lifetime_spent": spent}


@dataclass(frozen=True)
class Verification:
    """What a successful verification found."""

    certificate: Certificate
    recomputed_epsilon: float
    files: int
    is_authenticated: bool


def verify(release: Path, *, ledger: Ledger | None = None) -> Verification:
    """Check a released directory against its certificate, and with `ledger` the certificate too.

    Raises:
        VerificationFailed: with the first thing that does not hold.
    """
    certificate = read(release / FILE_NAME)
    _check_files(release, certificate)
    try:
        epsilon = _check_epsilon(certificate)
    except (KeyError, TypeError, ValueError, ArithmeticError, InvalidSettings) as error:
        raise VerificationFailed(
            f"the certified plan cannot be computed ({one_line(error)}); {AGAIN}"
        ) from error
    if ledger is not None:
        _check_origin(certificate, ledger)
    return Verification(certificate, epsilon, len(certificate.content["files"]), ledger is not None)


def read(path: Path) -> Certificate:
    """Read a certificate, check its seal, and that it has all fields that one has."""
    try:
        raw = read_whole(path, most=MOST_BYTES)
        content = parse_json(raw)
    except OSError as error:
        raise VerificationFailed(
            f"there is no readable certificate in {path.parent} ({error.strerror}); expected a "
            "directory that `understudy generate` wrote"
        ) from error
    except ValueError as error:
        raise VerificationFailed(f"{path} is not JSON ({error}); it was edited; {AGAIN}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise VerificationFailed(
            f"{path} is a certificate of format {found}, this version of understudy reads "
            f"{FORMAT}; use a newer version"
        )
    if found != FORMAT:
        raise VerificationFailed(
            f"{path} is not a certificate of format {FORMAT}; name the directory of a run, or its "
            "release/"
        )
    unsealed = {key: value for key, value in content.items() if key != "seal"}
    try:
        is_sealed = content.get("seal") == hashlib.sha256(canonical_json(unsealed)).hexdigest()
        is_intact = is_sealed and canonical_json(content) == raw
    except (ValueError, RecursionError):  # NaN, half a character: nothing that we write
        is_intact = False
    if not is_intact:
        raise VerificationFailed(f"{path} was edited: its seal does not match its content; {AGAIN}")
    check_form(content)
    return Certificate(content)


def _check_files(release: Path, certificate: Certificate) -> None:
    listed: dict[str, str] = certificate.content["files"]
    found = list(release.rglob("*"))
    if links := sorted(p.relative_to(release).as_posix() for p in found if p.is_symlink()):
        raise VerificationFailed(
            f"{links[0]} in {release} is a link; put the file itself there, or remove it"
        )
    present = {p.relative_to(release).as_posix() for p in found if not p.is_dir()}
    if missing := sorted(set(listed) - present):
        raise VerificationFailed(f"{missing[0]} is certified but missing from {release}; {AGAIN}")
    if unlisted := sorted(present - set(listed) - {FILE_NAME}):
        raise VerificationFailed(
            f"{unlisted[0]} is in {release} but not certified; move it out, for nothing is known "
            "of it"
        )
    for name, digest in listed.items():
        if not (release / name).is_file():  # a pipe would be waited on for ever
            raise VerificationFailed(f"{name} is not a file; remove it from {release}")
        if file_digest(release / name) != digest:
            raise VerificationFailed(f"{name} is not the file that was certified; {AGAIN}")


def _check_epsilon(certificate: Certificate) -> float:
    """Recompute epsilon from the plan and compare it with what is certified."""
    if not certificate.has_guarantee:
        return math.inf
    guarantee = certificate.content["guarantee"]
    plan, multiplier = _plan_and_noise(certificate)
    for line in certificate.content["releases"]:
        if line["made"] > line["count"]:
            raise VerificationFailed(
                f"release {line['name']} was made more often than planned; {NOT_GUARANTEED}"
            )
    if guarantee["accountant"] == "pld":
        check_cost(plan, multiplier)
    split = guarantee["delta_split"]
    if tail_delta(plan, multiplier) > split["sampler_tail"]:
        raise VerificationFailed(
            f"the noise sampler's tail exceeds its part of delta; {NOT_GUARANTEED}"
        )
    if split["accounted"] + split["sampler_tail"] > guarantee["delta"] * (1 + 1e-12):
        raise VerificationFailed(f"the parts of delta exceed delta; {NOT_GUARANTEED}")
    if told := certificate.content.get("federation"):
        Course.from_json(told).check(told["outside"], plan, multiplier)
    epsilon = epsilon_of(plan, multiplier, split["accounted"], guarantee["accountant"])
    target = guarantee["target_epsilon"]
    if not (epsilon <= target and _is_covered(epsilon, guarantee["epsilon"])):
        raise VerificationFailed(
            f"the plan costs epsilon {epsilon:.4f}, but {guarantee['epsilon']:.4f} of at most "
            f"{target:g} is certified; {NOT_GUARANTEED}"
        )
    _check_statements(certificate)
    _check_curve(guarantee, plan, multiplier)
    return epsilon


def _is_covered(epsilon: float, stated: float) -> bool:
    """Say whether an epsilon is at most what is stated, but for what computing it may cost."""
    return epsilon <= stated + min(EPSILON_TOLERANCE, stated / 100)


def _check_curve(guarantee: Mapping[str, Any], plan: Plan, multiplier: float) -> None:
    """Refuse a curve that is below the plan's at a delta."""
    stated: list[dict[str, float]] = guarantee["curve"]
    tail, deltas = guarantee["delta_split"]["sampler_tail"], [point["delta"] for point in stated]
    if min(deltas, default=1) <= tail:
        raise VerificationFailed(
            f"an epsilon at delta {min(deltas):g} is certified, where the noise sampler's tail "
            f"alone is {tail:g}; {NOT_GUARANTEED}"
        )
    found = _curve(plan, multiplier, deltas, tail, guarantee["accountant"])
    for point, least in zip(stated, found, strict=True):
        if not _is_covered(least["epsilon"], point["epsilon"]):
            raise VerificationFailed(
                f"epsilon {point['epsilon']:.4f} at delta {point['delta']:g} is certified, but the "
                f"plan costs {least['epsilon']:.4f}; {NOT_GUARANTEED}"
            )


def _check_statements(certificate: Certificate) -> None:
    """Refuse statements that contradict one another."""
    guarantee, data_set = (certificate.content[part] for part in ("guarantee", "data_set"))
    facts, total = data_set["public_facts"], data_set["composed_total"]
    if guarantee["unit"] != facts["unit"]:
        raise VerificationFailed(
            f"the unit of the guarantee is '{guarantee['unit']}', that of the data set "
            f"'{facts['unit']}'; {NOT_GUARANTEED}"
        )
    if guarantee["delta"] * facts["units"] >= 1 and not guarantee["is_delta_large"]:
        raise VerificationFailed(
            f"delta is {guarantee['delta']:g} for {facts['units']} units, which is large, but not "
            f"called so; {NOT_GUARANTEED}"
        )
    composed = total["epsilon"] if total["delta"] <= guarantee["delta"] else None
    if composed is not None and not _is_covered(guarantee["epsilon"], composed):
        raise VerificationFailed(
            f"this run costs epsilon {guarantee['epsilon']:.4f}, but all runs on the data set "
            f"{composed:.4f}; {NOT_GUARANTEED}"
        )


def _plan_and_noise(certificate: Certificate) -> tuple[Plan, float]:
    """Return the certified plan and its common noise multiplier."""
    lines, computed = certificate.content["releases"], ("made", "bounds", "noise_multiplier")
    plan = Plan.from_json([{k: v for k, v in line.items() if k not in computed} for line in lines])
    multipliers = {line["noise_multiplier"] / line["noise_ratio"] for line in lines}
    multiplier = min(multipliers)
    if max(multipliers) - multiplier > 1e-9 * multiplier:
        raise VerificationFailed(
            f"the noise multipliers of the releases contradict each other; {NOT_GUARANTEED}"
        )
    return plan, multiplier


def epsilon_after(certificate: Certificate, made: Mapping[str, int]) -> float:
    """Return the epsilon of a part of a run's releases, at the certificate's delta."""
    if not certificate.has_guarantee:
        return math.inf
    plan, multiplier = _plan_and_noise(certificate)
    lines = tuple(replace(line, count=made[line.name]) for line in plan if made.get(line.name))
    guarantee = certificate.content["guarantee"]
    accounted = guarantee["delta_split"]["accounted"]
    return epsilon_of(Plan(lines), multiplier, accounted, guarantee["accountant"]) if lines else 0.0


def implied_curve(certificate: Certificate, deltas: Sequence[float]) -> list[tuple[float, float]]:
    """Return (epsilon, delta) of the certified plan at further deltas, the sampler's tail included.

    A plan has a guarantee at every delta at once; the certificate states a few. Deltas that the
    tail alone would exceed are left out. Computed coarsely, so a little above what is certified.
    """
    guarantee = certificate.content["guarantee"]
    plan, multiplier = _plan_and_noise(certificate)
    tail = guarantee["delta_split"]["sampler_tail"]
    inner = [delta - tail for delta in deltas if delta > tail]
    accountant = guarantee["accountant"]
    coarse = wide_interval(plan, multiplier, min(inner, default=0.5))
    curve = epsilon_curve(plan, multiplier, inner, accountant, interval=coarse)
    return [(epsilon, delta + tail) for epsilon, delta in zip(curve, inner, strict=True)]


def is_issued_with(certificate: Certificate, ledger: Ledger) -> bool:
    """Say whether a certificate was issued with this ledger, for a run that it knows."""
    try:
        _check_origin(certificate, ledger)
    except VerificationFailed:
        return False
    return True


def _check_origin(certificate: Certificate, ledger: Ledger) -> None:
    content = certificate.content
    if "federation" in content:
        raise VerificationFailed(
            "this certificate is a federation's: no ledger knows it, each client's own knows that "
            "client's part; leave out --ledger, and compare with the clients' `federated.json`"
        )
    stripped = {k: v for k, v in content.items() if k not in ("seal", "authentication")}
    expected = ledger.mac(canonical_json(stripped)).hex()
    if not hmac.compare_digest(expected, str(content["authentication"])):
        raise VerificationFailed(
            f"the certificate was not issued with the key of {ledger.path}; name the ledger that "
            "the run was made with by --ledger-path, or do not trust its origin"
        )
    row = ledger.run(content["run"])
    if row is None or row["certificate"] != content["seal"]:
        raise VerificationFailed(
            f"{ledger.path} does not know this certificate; it may be an older copy of the ledger: "
            "`understudy ledger check` tells"
        )
