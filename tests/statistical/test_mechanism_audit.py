"""Audit of each release: thousands of repetitions with a worst-case unit and without it."""

from __future__ import annotations

from typing import get_args

import pytest

from door import halved_noise
from understudy.audit.mechanisms import PROBES, audit_release
from understudy.privacy.plan import Kind

WHOLE = [name for name, probe in PROBES.items() if probe.rate == 1]


def test_every_kind_of_release_has_an_audit():
    assert {probe.kind for probe in PROBES.values()} == set(get_args(Kind))


@pytest.mark.parametrize("name", WHOLE)
def test_lower_bound_lies_between_eight_tenths_of_the_claim_and_the_claim(name):
    """A sound release fails the upper side less than once in a hundred runs.

    The bound is repeated once before it may fail, so a false alarm is one in ten thousand or so.
    """
    repetitions = 1000 if PROBES[name].takes_turns else 3000
    bounds = [audit_release(name, repetitions=repetitions)]
    if not 0.8 * bounds[0].claimed <= bounds[0].bound <= bounds[0].claimed:
        bounds.append(audit_release(name, repetitions=repetitions))
    assert any(0.8 * one.claimed <= one.bound <= one.claimed for one in bounds), bounds


@pytest.mark.parametrize("name", WHOLE)
def test_the_audit_catches_halved_noise(name):
    found = audit_release(name, repetitions=500, randomness=halved_noise)
    assert found.is_violation
    assert found.bound > 1.3 * found.claimed
