"""The smallest method with a generator: noisy class counts, and a network nobody trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from understudy.methods.method import Preset, setting
from understudy.nets.generators import ConvGenerator
from understudy.nets.released import Generator
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet


@dataclass(frozen=True)
class PainterConfig:
    count: int = setting(20, "images to make")


class Painter:
    config_class: ClassVar[type] = PainterConfig
    summary: ClassVar[str] = "paints"
    public_inputs = ()
    presets: ClassVar[dict[str, Preset]] = {"only": Preset(lambda *_: {}, "nothing")}

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        return "only"

    def __init__(self, config: Any, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed

    def plan(self) -> Plan:
        line = PlannedRelease(
            name="histogram", kind="histogram", count=1, dimension=self.facts.classes,
            sampling_rate=1.0,
        )  # fmt: skip
        return Plan((line,))

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        counts = curator.histogram().double().clamp(min=1)
        network = ConvGenerator(self.facts.shape, self.facts.classes, hidden=20)
        params = network.init(public_generator(self.seed, "params"))
        statistics = network.statistics(
            params, public_generator(self.seed, "statistics"), batches=1
        )
        shares = tuple((counts / counts.sum()).tolist())
        generator = Generator(network, params, statistics, shares)
        images, labels = generator.sample(self.config.count, seed=self.seed)
        return SyntheticSet(images, labels, self.facts.class_names, generator=generator)
