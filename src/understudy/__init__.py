"""Understudy: synthetic stand-ins for private labelled image sets, with a certified DP guarantee.

>>> import understudy
>>> print(*understudy.METHODS)  # doctest: +NORMALIZE_WHITESPACE
psg rehearsal dp-merf dp-hp dp-mepf datalens g-pate pate-gan gs-wgan dpdm dp-gan dp-cgan dp-sinkhorn
dp-sgd
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from understudy.audit.released import audit_run
    from understudy.data.images import labelled_images
    from understudy.finished import export, load, load_classifier, load_result, sample, verify
    from understudy.measures import (
        evaluate,
        measure_convergence,
        measure_memorisation,
        measure_quality,
    )
    from understudy.methods import METHODS
    from understudy.pipeline import (
        fetch,
        load_data,
        register,
        synthesize,
        synthesize_all,
        train_classifier,
    )
    from understudy.pretraining import pretrain, pretrain_gan
    from understudy.report import write_report

# Loaded when first used, so that `understudy --help` does not wait for torch.
_HOMES = {
    "METHODS": "understudy.methods",
    "audit_run": "understudy.audit.released",
    "evaluate": "understudy.measures",
    "export": "understudy.finished",
    "fetch": "understudy.pipeline",
    "labelled_images": "understudy.data.images",
    "load": "understudy.finished",
    "load_classifier": "understudy.finished",
    "load_data": "understudy.pipeline",
    "load_result": "understudy.finished",
    "measure_convergence": "understudy.measures",
    "measure_memorisation": "understudy.measures",
    "measure_quality": "understudy.measures",
    "pretrain": "understudy.pretraining",
    "pretrain_gan": "understudy.pretraining",
    "register": "understudy.pipeline",
    "sample": "understudy.finished",
    "synthesize": "understudy.pipeline",
    "synthesize_all": "understudy.pipeline",
    "train_classifier": "understudy.pipeline",
    "verify": "understudy.finished",
    "write_report": "understudy.report",
}

__all__ = [
    "METHODS",
    "audit_run",
    "evaluate",
    "export",
    "fetch",
    "labelled_images",
    "load",
    "load_classifier",
    "load_data",
    "load_result",
    "measure_convergence",
    "measure_memorisation",
    "measure_quality",
    "pretrain",
    "pretrain_gan",
    "register",
    "sample",
    "synthesize",
    "synthesize_all",
    "train_classifier",
    "verify",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'understudy' has no attribute '{name}'")
