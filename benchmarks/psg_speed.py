"""PSG's three steps, as published and as here, in one process on the same device.

(a) as published: torch modules, per-example gradients from hooks (Opacus where it can be imported,
else the same by hand), double backward by autograd, eager, float32;
(b) ours: the engine, rows by layer or by record, fused operators where there are any.

Prints milliseconds per outer step (release and image step) and inner step, the hours of a full run
at 10 images per class, the ratio, and the ratio to the counted floor: the operations that cannot be
avoided at the speed of a large matrix product, or the bytes at that of a large copy, whichever is
more; both speeds measured in the same run. Writes docs/results/psg_speed_<device>.{json,md}.

    python benchmarks/psg_speed.py [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import RESULTS, commit, device_name
from understudy.methods.psg import PSG, PSGConfig, matching_distance
from understudy.nets.params import narrow_on, parameter_count
from understudy.privacy.group import ALONE
from understudy.privacy.plan import PublicFacts
from understudy.privacy.randomness import InjectedRandomness, SecretRandomness
from understudy.privacy.records import Records
from understudy.privacy.releases.gradient import gradient
from understudy.privacy.sampling import Access
from understudy.training import engine as running
from understudy.training.engine import Engine, choose_device
from understudy.training.sgd import SGD, RecordLoss, fit

running.TO_COMPILE = 0  # on a CPU, too: what a long run gets
UNITS, CLIP, INNER_AT_ONCE = 6000, 0.1, 50
FACTS = PublicFacts(
    units=UNITS, class_names=tuple("0123456789"), shape=(1, 28, 28), mean=(0.13,), std=(0.31,)
)
CONFIG = PSGConfig()
OUTER_STEPS, INNER_STEPS = CONFIG.steps, CONFIG.rounds * (CONFIG.outer - 1) * CONFIG.inner


def published_network(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, padding in ((1, 3), (width, 1), (width, 1)):
        layers += [
            nn.Conv2d(channels, width, 3, padding=padding),
            nn.GroupNorm(width, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 16, 10))


class HookedGradients:
    """Per-example gradients as Opacus computes them: what each layer saw, times what came back."""

    def __init__(self, module: nn.Sequential) -> None:
        self.module, self.seen = module, {}
        for layer in module:
            if list(layer.parameters()):
                layer.register_forward_hook(self._note)
                layer.register_full_backward_hook(self._multiply)

    def _note(self, layer: nn.Module, inputs: Any, _: Any) -> None:
        self.seen[layer] = inputs[0].detach()

    def _multiply(self, layer: Any, _: Any, outputs: Any) -> None:
        seen, slope = self.seen.pop(layer), outputs[0]
        count = len(slope)
        if isinstance(layer, nn.Conv2d):
            patches = F.unfold(seen, layer.kernel_size, padding=layer.padding)
            rows = torch.einsum(
                "nol,npl->nop", slope.reshape(count, layer.out_channels, -1), patches
            )
            layer.weight.grad_sample = rows.view(count, *layer.weight.shape)
            layer.bias.grad_sample = slope.sum((2, 3))
        elif isinstance(layer, nn.GroupNorm):
            normal = F.group_norm(seen, layer.num_groups, eps=layer.eps)
            layer.weight.grad_sample = (slope * normal).sum((2, 3))
            layer.bias.grad_sample = slope.sum((2, 3))
        else:
            layer.weight.grad_sample = torch.einsum("no,ni->noi", slope, seen)
            layer.bias.grad_sample = slope


def hooked(module: nn.Sequential) -> nn.Module:
    try:
        from opacus import GradSampleModule
    except ImportError:
        HookedGradients(module)
        return module
    return GradSampleModule(module, loss_reduction="sum")


class Published:
    """(a)."""

    def __init__(self, device: torch.device, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.module = published_network(CONFIG.width).to(device)
        self.sampled = hooked(published_network(CONFIG.width).to(device))
        shape = (len(labels), *FACTS.shape)
        self.synthetic = torch.randn(shape, device=device).requires_grad_()
        self.optimiser = torch.optim.SGD([self.synthetic], lr=0.1, momentum=0.5)

    def release(self, private: Tensor, private_labels: Tensor) -> list[Tensor]:
        self.sampled.zero_grad()
        loss = F.cross_entropy(self.sampled(private), private_labels, reduction="sum")
        loss.backward()
        rows = [p.grad_sample for p in self.sampled.parameters()]
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows]).norm(dim=0)
        scale = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        sums = [torch.einsum("n,n...->...", scale, row) for row in rows]
        return [(s + CLIP * torch.randn_like(s)) / len(private) for s in sums]

    def image_step(self, real: list[Tensor]) -> None:
        weights = list(self.module.parameters())
        loss = F.cross_entropy(self.module(self.synthetic), self.labels)
        mine = torch.autograd.grad(loss, weights, create_graph=True)
        names = [str(number) for number in range(len(weights))]
        distance = matching_distance(
            dict(zip(names, real, strict=True)), dict(zip(names, mine, strict=True))
        )
        self.optimiser.zero_grad()
        distance.backward()
        self.optimiser.step()

    def inner_step(self) -> None:
        weights = list(self.module.parameters())
        loss = F.cross_entropy(self.module(self.synthetic.detach()), self.labels)
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data.sub_(slope, alpha=0.01)

    def plain_backward(self, private: Tensor, private_labels: Tensor) -> None:
        loss = F.cross_entropy(self.module(private), private_labels)
        torch.autograd.grad(loss, list(self.module.parameters()))


Work = tuple[Callable[[], Any], int]
"""A function, and how many steps one call of it is."""


def measured(
    device: torch.device,
    *work: Work,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return milliseconds per step of each: the best of some rounds, all taking turns.

    Machines are shared and change their speed; what takes turns meets the same conditions.
    """

    def seconds(function: Callable[[], Any], times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = clock()
        for _ in range(times):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - started

    best = [float("inf")] * len(work)
    times = []
    for function, _ in work:
        function()
        times.append(max(1, int(0.2 / seconds(function, 1))))
    for _ in range(rounds):
        for number, (function, steps) in enumerate(work):
            taken = seconds(function, times[number]) / times[number] / steps
            best[number] = min(best[number], 1e3 * taken)
    return best


def machine(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return (operations per second of a large product, bytes per second of a large copy)."""
    side, count = (8192, 2**28) if device.type == "cuda" else (2048, 2**26)
    a = torch.randn(side, side, device=device).to(dtype)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    product, copy = measured(device, (lambda: a @ a, 1), (lambda: target.copy_(source), 1))
    return 2 * side**3 / (1e-3 * product), 8 * count / (1e-3 * copy)


def floors(device: torch.device, batch: int, images: int) -> dict[str, float]:
    """Count what a step cannot do without, in milliseconds on this machine.

    Operations: the products of the three convolutions, forward once, backward twice (the first
    layer's input needs none), the image step forward once and backward six times. Bytes: each map
    between layers written and read once a pass; per-example rows written once and read twice.
    """
    maps_type = narrow_on(device) or torch.float32
    width, size = CONFIG.width, maps_type.itemsize
    operations, bandwidth = machine(device, maps_type)
    first = 2 * 1024 * 9 * width
    later = 2 * (256 + 64) * 9 * width**2
    maps = size * width * (256 + 64 + 16) * 2  # after pooling: the rest need not be stored
    rows = 3 * size * 317_322

    def milliseconds(flops: float, moved: float) -> float:
        return 1e3 * max(flops / operations, moved / bandwidth)

    return {
        "release": milliseconds(batch * (2 * first + 3 * later), batch * (3 * maps + rows)),
        "image": milliseconds(images * (6 * first + 7 * later), images * 7 * maps),
        "inner": milliseconds(images * (2 * first + 3 * later), images * 3 * maps),
    }


def ours(device: torch.device, private: Tensor, private_labels: Tensor) -> dict[str, Work]:
    """(b)."""
    engine = Engine(device)
    psg = PSG(CONFIG, FACTS, seed=0)
    network = psg.network.on(device)
    loss = RecordLoss(network, FACTS.mean, FACTS.std)
    image_step = psg._image_step(network, 1.0)
    places, starts = torch.arange(UNITS), torch.arange(UNITS + 1)
    records = Records(private, private_labels, places, starts, one_each=True)
    access = Access(
        records=records, randomness=SecretRandomness(device), units=UNITS, classes=10,
        sampling_rate=CONFIG.batch / UNITS, noise_multiplier=1.0, engine=engine, group=ALONE,
    )  # fmt: skip
    exact = InjectedRandomness(  # so that (a) and (b) have the same 256 records
        uniform=lambda count: (torch.arange(count) >= CONFIG.batch).double(),
        normal=access.randomness.normal,
    )
    access = replace(access, randomness=exact) if device.type == "cpu" else access
    theta = psg._draw(0, device)
    labels = torch.arange(10, device=device).repeat_interleave(CONFIG.images_per_class)
    images = torch.randn((len(labels), *FACTS.shape), device=device)
    state = {"images": images}, {"images": torch.zeros_like(images)}
    known, rate = {"labels": labels}, torch.full((), 0.1, device=device)

    def release() -> Any:
        return gradient(access, loss, theta, clip_norm=CLIP)

    real = release()
    sgd = SGD(lr=0.01, epochs=INNER_AT_ONCE if device.type == "cuda" else 1)
    nobody = torch.Generator()

    def inner() -> Any:
        return fit(network, theta, images, labels, sgd=sgd, generator=nobody, engine=engine)

    def image() -> Any:
        return engine.run(image_step, state, known, theta, real, rate)

    assert parameter_count(theta) == 317_322
    return {"release": (release, 1), "image": (image, 1), "inner": (inner, sgd.epochs)}


def published(device: torch.device, private: Tensor, private_labels: Tensor) -> dict[str, Work]:
    """(a)."""
    labels = torch.arange(10, device=device).repeat_interleave(CONFIG.images_per_class)
    shape = (len(labels), *FACTS.shape)
    side = Published(device, torch.randn(shape, device=device), labels)
    batch = private[: CONFIG.batch].float() / 255
    batch_labels = private_labels[: CONFIG.batch]
    real = [part.detach() for part in side.release(batch, batch_labels)]
    return {
        "release": (lambda: side.release(batch, batch_labels), 1),
        "image": (lambda: side.image_step(real), 1),
        "inner": (side.inner_step, 1),
        "plain_backward": (lambda: side.plain_backward(batch, batch_labels), 1),
    }


def full_run(step: dict[str, float]) -> float:
    """Return the hours of a run at 10 images per class and epsilon 10."""
    total = OUTER_STEPS * (step["release"] + step["image"]) + INNER_STEPS * step["inner"]
    return 1e-3 * total / 3600


def table(found: dict[str, Any]) -> str:
    a, b, floor = found["published"], found["ours"], found["floor"]

    def line(name: str, of: Callable[[dict[str, float]], float], digits: int = 3) -> str:
        x, y, z = of(a), of(b), of(floor)
        return (
            f"| {name} | {x:.{digits}f} | {y:.{digits}f} | {x / y:.1f} | {z:.{digits}f} "
            f"| {y / z:.1f} |"
        )

    lines = [
        f"# PSG's speed on {found['device']}",
        "",
        "Written by `benchmarks/psg_speed.py`. Width 128, 28 px, batches of 256, 10 images per "
        f"class; per-example gradients of (a) by {found['hooks']}. Commit {found['commit']}, torch "
        f"{found['torch']}.",
        "",
        "| | (a) as published | (b) ours | a / b | counted floor | b / floor |",
        "|---|---|---|---|---|---|",
        line("release, ms", lambda s: s["release"]),
        line("image step, ms", lambda s: s["image"]),
        line("outer step, ms", lambda s: s["release"] + s["image"]),
        line("inner step, ms", lambda s: s["inner"]),
        line("full run, hours", full_run, 2 if found["published"]["inner"] > 50 else 4),
        "",
        f"A plain backward pass on the same batch takes {a['plain_backward']:.3f} ms: the release "
        f"costs {b['release'] / a['plain_backward']:.2f} times that.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    device = choose_device(parser.parse_args().device)
    generator = torch.Generator().manual_seed(0)
    private = torch.randint(
        0, 256, (UNITS, *FACTS.shape), dtype=torch.uint8, generator=generator
    ).to(device)
    private_labels = (torch.arange(UNITS) % 10).to(device)
    try:
        import opacus

        hooks = f"Opacus {opacus.__version__}"
    except ImportError:
        hooks = "hooks of our own (Opacus is not installed there)"
    found: dict[str, Any] = {
        "device": device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "hooks": hooks,
        "published": {},
        "ours": {},
        "floor": floors(device, CONFIG.batch, 10 * CONFIG.images_per_class),
    }
    a, b = (side(device, private, private_labels) for side in (published, ours))
    for name in b:
        found["published"][name], found["ours"][name] = measured(device, a[name], b[name])
    (found["published"]["plain_backward"],) = measured(device, a["plain_backward"])
    path = RESULTS / f"psg_speed_{device.type}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
