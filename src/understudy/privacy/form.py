"""The form of a certificate: which fields it has, and what each may hold.

A certificate may come from anybody, sealed over whatever they wrote. What has this form can be
shown, listed and recomputed; whether it is true is for `certificate.verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.errors import VerificationFailed
from understudy.privacy.plan import PublicFacts

MOST_LINES = 1000
"""Of a list: classes, releases, points of a curve."""
MOST_CHARACTERS = 1000
LARGEST = 1e15
Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS and value.isprintable()


def _number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= LARGEST  # so neither infinite nor NaN


def _positive(value: Any) -> bool:
    return _number(value) and value >= 1 / LARGEST**2


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _delta(value: Any) -> bool:
    return _positive(value) and value < 1


def _epsilon(value: Any) -> bool:
    return _number(value) and value >= 0


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value) and value >= 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _plain(value: Any) -> bool:
    return value is None or _text(value) or _flag(value) or _number(value)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


FACTS: dict[str, Any] = {
    "units": _count,
    "unit": _text,
    "class_names": [_text],
    "shape": [_count],
    "mean": [_number],
    "std": [_number],
}
RELEASE: dict[str, Any] = {
    "name": _text,
    "kind": _text,
    "count": _count,
    "made": _count,
    "dimension": _count,
    "sampling_rate": _share,
    "noise_ratio": _positive,
    "noise_multiplier": _number,
    "bounds": _or_none(lambda value: _is_list(value) and all(map(_number, value))),
}
FORM: dict[str, Any] = {
    "run": _text,
    "authentication": _text,
    "extra_attempts": _count,
    "files": dict,
    "data_set": {
        "name": _text,
        "relation": _text,
        "lineage": _plain,
        "is_public_benchmark": _flag,
        "held_out_share": _share,
        "public_facts": FACTS,
        "composed_total": {
            "runs": _count,
            "epsilon": _or_none(_epsilon),
            "delta": _delta,
            "accountant": _text,
        },
    },
    "method": {
        "name": _text,
        "preset": _plain,
        "preset_tuned_on": _plain,
        "public_inputs": [{"name": _text, "trained_on": _text}],
        "seed": _plain,
        "settings": dict,
        "understudy": _text,
    },
    "releases": [RELEASE],
}
NO_GUARANTEE: dict[str, Any] = {"kind": _text, "reason": _text, "delta": _delta}
GUARANTEE: dict[str, Any] = {
    "kind": _text,
    "epsilon": _epsilon,
    "target_epsilon": _epsilon,
    "delta": _delta,
    "delta_split": {"accounted": _delta, "sampler_tail": _share},
    "is_delta_large": _flag,
    "unit": _text,
    "curve": [{"delta": _delta, "epsilon": _epsilon}],
    "accountant": lambda value: value in ("pld", "renyi"),
    "library": _text,
}
FEDERATION: dict[str, Any] = {
    "clients": _count,
    "asked_per_round": _count,
    "rounds": _count,
    "rounds_with_all_clients": _count,
    "dimension": _count,
    "parts": [{"rounds_answered": _count, "noise_multiplier": _number, "delta": _share}],
    "outside": _or_none(
        lambda value: (
            isinstance(value, dict)
            and _epsilon(value.get("epsilon"))
            and _text(value.get("condition"))
        )
    ),
}
"""Of what clients of a federation told its server; others' certificates lack it."""


def check_form(content: dict[str, Any]) -> None:
    """Refuse a certificate that lacks a field, or holds something else in it.

    Raises:
        VerificationFailed: with the first such field.
    """
    _check(content, FORM, "")
    found = content.get("guarantee")
    is_none = isinstance(found, dict) and found.get("kind") == "none"
    _check(found, NO_GUARANTEE if is_none else GUARANTEE, "guarantee")
    if "federation" in content:
        _check(content["federation"], FEDERATION, "federation")
    if not all(_text(name) and _text(digest) for name, digest in content["files"].items()):
        raise _wrong("files")
    facts = content["data_set"]["public_facts"]
    channels = len(facts["mean"])
    if not (len(facts["shape"]) == 3 and len(facts["std"]) == channels and facts["class_names"]):
        raise _wrong("data_set.public_facts")
    try:
        PublicFacts.from_json(facts)
    except TypeError:
        raise _wrong("data_set.public_facts") from None


def _check(found: Any, form: Any, where: str) -> None:
    if isinstance(form, dict):
        if not isinstance(found, dict):
            raise _wrong(where)
        for name, part in form.items():
            inside = f"{where}.{name}" if where else name
            if name not in found:
                raise _wrong(inside)
            _check(found[name], part, inside)
    elif isinstance(form, list):
        if not _is_list(found):
            raise _wrong(where)
        for value in found:
            _check(value, form[0], where)
    elif not (isinstance(found, form) if form is dict else form(found)):
        raise _wrong(where)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_LINES


def _wrong(field: str) -> VerificationFailed:
    return VerificationFailed(
        f"the certificate lacks or garbles a field ({field}); expected what `understudy generate` "
        "writes; get the release again"
    )
