"""Pre-training of a GAN on a public set, and the file that its two networks go on from.

Nothing is private here, so the discriminator takes ordinary steps on whole batches. Which classes
the public set has does not matter: what each network holds of a class is a row of a table, and the
classes of a private set start as copies of rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from understudy.data.images import LabelledImages
from understudy.errors import InvalidSettings, MissingWeights
from understudy.nets.discriminators import ConvDiscriminator, with_classes
from understudy.nets.generators import ClassNormGenerator, GeneratorNetwork
from understudy.nets.modules import Shape, skeleton
from understudy.nets.params import Params, moved
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import metadata
from understudy.training.adam import Adam, AdamState
from understudy.training.adversarial import Game, GeneratorStep, Loss, check_game, kept_at
from understudy.training.augmentation import augmented
from understudy.training.engine import Engine
from understudy.training.pretraining import AUGMENTATIONS

FORMAT = 1
HEADER = "understudy.gan"
ARCHITECTURE = ("code", "width", "critic_width", "norm")
"""Settings that whoever goes on from a file must have too."""


@dataclass(frozen=True, kw_only=True)
class GANPretraining:
    """How the two networks are trained: Adam, one step each in turn."""

    steps: int = 20_000
    """Steps of the generator."""
    turns: int = 1
    """Steps of the discriminator for each."""
    batch: int = 128
    """Public images, and generated ones, per step."""
    loss: Loss = "hinge"
    """non-saturating, hinge or wasserstein."""
    penalty: float = 1.0
    """Weight of a penalty on scores that are steep."""
    critic_lr: float = 2e-4
    """Learning rate of the discriminator."""
    lr: float = 2e-4
    """Learning rate of the generator."""
    momentum: float = 0.0
    """Adam's first beta, of both."""
    ema: float = 0.999
    """How much of the averaged generator stays, each step."""
    code: int = 60
    """Length of the generator's random code."""
    width: int = 32
    """Channels of the generator's last maps."""
    critic_width: int = 64
    """Channels of the discriminator's first maps."""
    norm: bool = True
    """Group norms in the discriminator."""
    labelled: bool = True
    """Learn the public set's classes apart; without, its labels are not used."""
    augment: Literal["none", "shift", "mirror"] = "none"
    """Shift images, or shift and mirror them, or neither."""
    seed: int = 0
    """Seed of initialisation, batches, codes and augmentation."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected at least 1")
        check_game(self)
        if self.augment not in AUGMENTATIONS:
            raise InvalidSettings(
                f"augment is '{self.augment}', expected one of {', '.join(AUGMENTATIONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class GANHeader:
    """What the file of a pre-trained GAN says about itself."""

    shape: Shape
    class_names: tuple[str, ...]
    """Of the rows that the networks have; none, and one row, without labels."""
    code: int
    width: int
    critic_width: int
    norm: bool
    trained_on: str
    images: int
    images_sha256: str
    """Digest of the training images' bytes (n, c, h, w)."""
    steps: int
    format: int = FORMAT

    @property
    def network(self) -> GeneratorNetwork:
        """The generator, without parameters."""
        classes = len(self.class_names)
        return ClassNormGenerator(self.shape, classes, code=self.code, width=self.width)

    @property
    def discriminator(self) -> ConvDiscriminator:
        """The discriminator, without parameters."""
        classes = len(self.class_names)
        return ConvDiscriminator(self.shape, classes, self.critic_width, self.norm)


@dataclass(frozen=True, eq=False)
class PretrainedGAN:
    """Two networks to go on from."""

    header: GANHeader
    generator: Params
    discriminator: Params

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        tensors = {
            f"{group}/{name}": weight.detach().cpu().contiguous()
            for group in ("generator", "discriminator")
            for name, weight in getattr(self, group).items()
        }
        return save_tensors(tensors, metadata={HEADER: json.dumps(asdict(self.header))})

    @classmethod
    def load(cls, path: Path) -> tuple[PretrainedGAN, PublicInput]:
        """Read a file that `pretrain-gan` has written; return also what to certify about it."""
        try:
            content = path.read_bytes()
            made = cls._read(content)
        except OSError as error:
            raise MissingWeights(
                f"{path} cannot be read ({error.strerror}); check the path"
            ) from None
        except (KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
            raise MissingWeights(
                f"{path} cannot be read as a pre-trained GAN ({str(error).splitlines()[0]}); "
                "expected a file written by `understudy pretrain-gan`"
            ) from None
        origin = PublicInput(
            kind="weights",
            name=path.stem,
            trained_on=made.header.trained_on,
            sha256=hashlib.sha256(content).hexdigest(),
        )
        return made, origin

    @classmethod
    def _read(cls, content: bytes) -> PretrainedGAN:
        tensors = load_tensors(content)
        fields = json.loads(metadata(content)[HEADER])
        for name in ("shape", "class_names"):
            fields[name] = tuple(fields[name])
        header = GANHeader(**fields)
        if header.format != FORMAT:
            raise ValueError(f"format {header.format}, expected {FORMAT}")
        with FakeTensorMode():  # a header may ask for any size
            judge = header.discriminator.init(torch.Generator())
        maker: Params = dict(skeleton(header.network).named_parameters())
        made = {"generator": maker, "discriminator": judge}
        wanted = {f"{g}/{n}": w.shape for g, params in made.items() for n, w in params.items()}
        found = {name: weight.shape for name, weight in tensors.items()}
        if wrong := {name for name, _ in wanted.items() ^ found.items()}:
            raise ValueError(f"{min(wrong)} is missing, unknown, or of another shape")
        return cls(
            header,
            *({n: tensors[f"{group}/{n}"] for n in params} for group, params in made.items()),
        )

    def for_classes(self, names: Sequence[str], *, seed: int) -> tuple[Params, Params]:
        """Return generator and discriminator for other classes, or for none.

        A class that the public set has too starts as that one, any other as one drawn by the public
        seed.
        """
        known, draws = self.header.class_names, public_generator(seed, "classes")
        order = torch.randperm(max(1, len(known)), generator=draws).tolist()
        rows = [
            known.index(name) if name in known else order[place % len(order)]
            for place, name in enumerate(names or ("",))
        ]
        return with_classes(self.generator, rows), with_classes(self.discriminator, rows)


@dataclass(frozen=True)
class PublicStep:
    """One step of the discriminator on public and generated images."""

    network: GeneratorNetwork
    game: Game
    adam: Adam
    penalty: float

    def __call__(
        self,
        state: tuple[Params, AdamState],
        real: tuple[Tensor, Tensor],
        generator: Params,
        codes: Tensor,
        lr: Tensor,
    ) -> tuple[Params, AdamState]:
        """Move the discriminator so that it tells the two apart better."""
        params, moments = state
        images, labels = real[0].float() / 255, real[1]
        with torch.no_grad():
            fakes = self.network(generator, codes, labels)
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        scores = self.game.discriminator(leaves, images, labels)
        fooled = self.game.discriminator(leaves, fakes, labels)
        loss = self.game.of_real(scores).mean() + self.game.of_fake(fooled).mean()
        if self.penalty:
            for place in (images, fakes):
                loss = loss + self.penalty * self.game.steepness(leaves, place, labels)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return self.adam.step(params, dict(zip(leaves, slopes, strict=True)), moments, lr)


class _Training:
    """The public set, and what is drawn of it at each step."""

    def __init__(self, data: LabelledImages, how: GANPretraining, engine: Engine) -> None:
        self.how, self.engine = how, engine
        labels = torch.from_numpy(data.labels) if how.labelled else torch.zeros(len(data.labels))
        self.images = torch.from_numpy(data.images).to(engine.device)
        self.labels = labels.long().to(engine.device)
        self.augment = AUGMENTATIONS[how.augment]

    def batch(self, step: int, turn: int) -> tuple[tuple[Tensor, Tensor], torch.Generator]:
        """Return public images with their labels, and a generator for codes."""
        drawn = public_generator(self.how.seed, "batch", step, turn)
        places = torch.randint(len(self.labels), (self.how.batch,), generator=drawn)
        places = moved({"places": places}, self.engine.device)["places"]
        images = self.images[places]
        if self.augment is not None:
            images = augmented(images, self.augment, drawn)
        return (images, self.labels[places]), drawn


def train_gan(
    data: LabelledImages,
    training: GANPretraining | None = None,
    *,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> PretrainedGAN:
    """Train a generator and a discriminator on a public set."""
    how, engine, report = training or GANPretraining(), engine or Engine(), progress or Progress()
    header = GANHeader(
        shape=data.shape,
        class_names=data.class_names if how.labelled else (),
        **{name: getattr(how, name) for name in ARCHITECTURE},
        trained_on=data.name,
        images=len(data.images),
        images_sha256=hashlib.sha256(np.ascontiguousarray(data.images).data).hexdigest(),
        steps=how.steps,
    )
    device, public = engine.device, _Training(data, how, engine)
    adam, game = Adam(betas=(how.momentum, 0.999)), Game(header.discriminator, how.loss)
    judging = PublicStep(header.network, game, adam, how.penalty)
    making = GeneratorStep(header.network, game, adam)
    first = moved(header.discriminator.init(public_generator(how.seed, "critic")), device)
    judge = first, adam.start(first)
    maker = making.start(moved(header.network.init(public_generator(how.seed, "network")), device))
    critic_lr, lr = (torch.full((), value, device=device) for value in (how.critic_lr, how.lr))
    for step in report.steps(range(how.steps), what="pre-training"):
        for turn in range(how.turns):
            real, drawn = public.batch(step, turn)
            codes = moved({"codes": header.network.codes(how.batch, drawn)}, device)["codes"]
            judge = engine.run(judging, judge, real, maker[0], codes, critic_lr)
        kept = torch.full((), kept_at(how.ema, step), device=device)
        known: dict[str, Any] = {"discriminator": judge[0], "kept": kept}
        maker = engine.run(making, maker, codes, real[1], known, lr)
    return PretrainedGAN(header, maker[2], judge[0])
