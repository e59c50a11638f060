"""The data card: what a released set is, in words for the person who receives it."""

from __future__ import annotations

from understudy.privacy.curator import Curator
from understudy.privacy.plan import Budget
from understudy.privacy.registration import Registration
from understudy.synthetic import SyntheticSet


def data_card(
    curator: Curator,
    registration: Registration,
    budget: Budget,
    method: str,
    synthetic: SyntheticSet,
) -> str:
    """Write the card as Markdown."""
    facts = curator.facts
    if curator.has_guarantee:
        guarantee = (
            f"Differential privacy with epsilon {curator.calibration.epsilon:.4g} and delta "
            f"{budget.delta:g}, for each {facts.unit}: whoever sees this set can hardly tell it "
            f"from one made after the data of any one {facts.unit} had been emptied. That changes "
            f"the probability of any outcome at most by a factor e^epsilon, but for delta. "
            "`certificate.json` says how this was reached; `understudy verify` checks it."
        )
    else:
        guarantee = "**None.** This set was made without noise. Do not share it."
    return f"""# A synthetic stand-in for {registration.name}

{len(synthetic.labels)} synthetic labelled images ({" x ".join(map(str, facts.shape))}, \
{facts.classes} classes), made by Understudy with the method `{method}`.

## Guarantee

{guarantee}

## What it is for

Training and testing models where the real data cannot go. The images were optimised to train
networks; they are not photographs of anything and need not look like the real ones.

## What it is not for

Conclusions about single persons, rare cases, or the exact frequencies of the real data.

## Files

`synthetic.safetensors`: `images` (float32, n x c x h x w, in [0, 1]) and `labels` (int64).
`contact_sheet.png`: some of the images, one row per class. `certificate.json`: the guarantee.
"""
