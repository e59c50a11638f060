"""How papers judge a synthetic set: which classifiers, trained how. See docs/evaluation.md.

Accuracy is always that of the last epoch. Nothing is selected on test data, even where a paper did.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from understudy.errors import InvalidSettings, installing
from understudy.evaluation.classical import CLASSICAL, is_installed
from understudy.nets.classifiers import NETWORKS
from understudy.training.sgd import SGD

Scale = Literal["normalised", "unit", "symmetric"]
"""What a network sees of a pixel p in [0, 1]: (p - mean) / std of the data set, p, or 2p - 1."""
FULL_SIZE = 1000
"""Images per class beyond which a set counts as full size in the protocol of PSG."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained."""

    sgd: SGD
    augment: bool = False

    def with_epochs(self, epochs: int | None) -> Recipe:
        """Return the same recipe, stretched or shortened together with its schedule."""
        if epochs is None:
            return self
        sgd = self.sgd
        drops = tuple(at * epochs // sgd.epochs for at in sgd.drop_at)
        peak = sgd.peak_at and max(1, sgd.peak_at * epochs // sgd.epochs)
        peak = None if epochs == 1 else peak  # no time to rise and fall
        return replace(self, sgd=replace(sgd, epochs=epochs, drop_at=drops, peak_at=peak))


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The evaluation of one paper."""

    grey: tuple[str, ...]
    """Models for images with one channel."""
    colour: tuple[str, ...]
    """Models for images with three."""
    seeds: int = 1
    scale: Scale = "unit"
    recipe: Callable[[bool, float], Recipe] | None = None
    """How networks are trained, given whether images are grey and their number per class."""


def _psg(is_grey: bool, per_class: float) -> Recipe:
    epochs = 40 if per_class > FULL_SIZE else 1000 if is_grey else 300
    sgd = SGD(lr=0.01, epochs=epochs, momentum=0.9, weight_decay=5e-4, drop_at=(epochs // 2,))
    return Recipe(sgd, augment=is_grey)


def _dp_mepf(is_grey: bool, per_class: float) -> Recipe:
    return Recipe(
        SGD(
            lr=0.5, epochs=10, batch=512, momentum=0.9, weight_decay=5e-4, label_smoothing=0.1,
            peak_at=5,
        )
    )  # fmt: skip


def _datalens(is_grey: bool, per_class: float) -> Recipe:
    if is_grey:
        return Recipe(SGD(lr=2e-3, epochs=600, batch=512))
    return Recipe(SGD(lr=1e-4, epochs=250, batch=256))


def _dpimagebench(is_grey: bool, per_class: float) -> Recipe:
    shared = SGD(lr=0.1, epochs=200, batch=126, momentum=0.9, weight_decay=5e-4, drop=0.2)
    if is_grey:
        return Recipe(replace(shared, epochs=50, batch=256, drop_at=(20, 40)))
    return Recipe(replace(shared, drop_at=(60, 120, 180)))


_SIX = ("convnet", "lenet", "alexnet", "vgg11", "resnet18", "mlp")
_THREE = ("resnet110", "wideresnet", "resnext")

PROTOCOLS = {
    "psg": Protocol(grey=_SIX, colour=_SIX, seeds=3, scale="normalised", recipe=_psg),
    "dp-merf": Protocol(grey=tuple(CLASSICAL), colour=tuple(CLASSICAL)),
    "dp-mepf": Protocol(
        grey=("logreg", "sklearn-mlp", "xgboost"), colour=("resnet9",), recipe=_dp_mepf
    ),
    "datalens": Protocol(grey=("datalens-cnn",), colour=("datalens-cnn",), recipe=_datalens),
    "dpimagebench": Protocol(grey=_THREE, colour=_THREE, scale="symmetric", recipe=_dpimagebench),
}
MODELS = (*NETWORKS, *CLASSICAL)
QUICK = "psg", ("convnet",)
"""Protocol and models of an evaluation that asks for neither."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an evaluation was asked for."""

    protocol: str | None = None
    """A paper's protocol; by default the ConvNet of psg alone."""
    models: Sequence[str] | None = None
    """Models, of any protocol, also as one text with commas; by default those of the protocol."""
    seeds: int | None = None
    """How often each model is trained; by default as the protocol says."""
    epochs: int | None = None
    """Epochs of each network; by default as the protocol says."""
    width: int = 128
    """Filters per convolution of the ConvNet."""
    seed: int = 0
    """Seed of initialisation, order of batches and augmentation."""
    subsample: int | None = None
    """Train on so many images of each class."""
    soft_labels: bool = True
    """Train networks on the set's probabilities of classes, where it has them."""
    augment: bool = True
    """Change images at random while networks train on them, where the protocol does."""
    ceiling: bool = False
    """Train on the real training records as well, to see what the best set could reach."""
    missing: bool = False
    """Leave out what was measured before."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "width", "subsample"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSettings(f"{name} is {value}, expected at least 1")
        if self.protocol is not None:
            _check_known("protocol", self.protocol, PROTOCOLS)
        if isinstance(self.models, str):
            names = tuple(name.strip() for name in self.models.split(","))
            object.__setattr__(self, "models", names)
        for model in self.models or ():
            _check_known("model", model, MODELS)
            if model in NETWORKS and self._protocol.recipe is None:
                raise InvalidSettings(
                    f"the protocol '{self.name}' trains no networks, so it does not say how to "
                    f"train '{model}'; use --protocol psg for it"
                )
            if not _is_available(model):
                raise InvalidSettings(
                    f"{model} is not installed; {installing(model)}, or leave it out of --models"
                )

    @property
    def name(self) -> str:
        """Name of the protocol."""
        return self.protocol or QUICK[0]

    @property
    def _protocol(self) -> Protocol:
        return PROTOCOLS[self.name]

    @property
    def scale(self) -> Scale:
        """What networks see of a pixel."""
        return self._protocol.scale

    def chosen_models(self, channels: int) -> tuple[str, ...]:
        """Return the models to train, those of the protocol that are not installed not among them.

        >>> Asked().chosen_models(1), Asked(protocol="dp-mepf").chosen_models(3)
        (('convnet',), ('resnet9',))
        """
        if self.models:
            return tuple(dict.fromkeys(self.models))
        if self.protocol is None:
            return QUICK[1]
        return tuple(m for m in self._of_protocol(channels) if _is_available(m))

    def left_out(self, channels: int) -> tuple[str, ...]:
        """Return the models of the protocol that are not installed."""
        if self.models or self.protocol is None:
            return ()
        return tuple(m for m in self._of_protocol(channels) if not _is_available(m))

    def _of_protocol(self, channels: int) -> tuple[str, ...]:
        return self._protocol.grey if channels == 1 else self._protocol.colour

    def recipe(self, channels: int, per_class: float) -> Recipe:
        """Return how networks are trained."""
        recipe = self._protocol.recipe
        if recipe is None:  # refused when it was asked for
            raise InvalidSettings(f"the protocol '{self.name}' trains no networks")
        usual = recipe(channels == 1, per_class).with_epochs(self.epochs)
        return replace(usual, augment=usual.augment and self.augment)

    def seeds_of(self, model: str) -> int:
        """Return how often a model is trained: once if no seed changes it."""
        if model in CLASSICAL and not CLASSICAL[model].is_random:
            return 1
        return self.seeds or self._protocol.seeds


def _is_available(model: str) -> bool:
    return model in NETWORKS or is_installed(model)


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(names)}"
    raise InvalidSettings(f"there is no {what} '{name}'; {hint}")
