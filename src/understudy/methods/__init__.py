"""The methods, one file each. Adding one: its file, a line here, a page in docs, a test row."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from understudy.errors import InvalidSettings

if TYPE_CHECKING:
    from understudy.methods.method import Method

METHODS = {
    "psg": "understudy.methods.psg:PSG",
    "rehearsal": "understudy.methods.rehearsal:Rehearsal",
    "dp-merf": "understudy.methods.dp_merf:DPMERF",
    "dp-hp": "understudy.methods.dp_hp:DPHP",
    "dp-mepf": "understudy.methods.dp_mepf:DPMEPF",
    "datalens": "understudy.methods.datalens:DataLens",
    "g-pate": "understudy.methods.g_pate:GPATE",
    "pate-gan": "understudy.methods.pate_gan:PATEGAN",
    "gs-wgan": "understudy.methods.gs_wgan:GSWGAN",
    "dpdm": "understudy.methods.dpdm:DPDM",
    "dp-gan": "understudy.methods.dp_gan:DPGAN",
    "dp-cgan": "understudy.methods.dp_gan:DPCGAN",
    "dp-sinkhorn": "understudy.methods.dp_sinkhorn:DPSinkhorn",
    "dp-sgd": "understudy.methods.dp_sgd:DPSGD",
}
OF_CLASSIFIERS = frozenset({"dp-sgd"})
"""Methods that train a classifier; the others make images."""


def load_method(name: str) -> type[Method]:
    """Return the method called `name`."""
    if name not in METHODS:
        raise InvalidSettings(f"there is no method '{name}', expected {', '.join(METHODS)}")
    module, _, attribute = METHODS[name].partition(":")
    return cast("type[Method]", getattr(import_module(module), attribute))


def check_makes_images(name: str) -> None:
    """Refuse a method that does not make images, and say what to do with it."""
    if name in OF_CLASSIFIERS:
        raise InvalidSettings(
            f"{name} trains a classifier and makes no images; use `understudy train-classifier`"
        )


def check_makes_classifier(name: str) -> None:
    """Refuse a method that does not train a classifier, and say what to do with it."""
    if name not in OF_CLASSIFIERS and name in METHODS:
        raise InvalidSettings(
            f"{name} makes images and trains no classifier; use `understudy generate`"
        )
