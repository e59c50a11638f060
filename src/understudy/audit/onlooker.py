"""An onlooker lets a method and its curator alone, and compares what was released with canaries.

Here canaries are ordinary records with odd labels, treated like all others. After each noisy
gradient the onlooker computes theirs, as anyone could who knows the method, and adds up how far the
two point the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.nets.params import Params
from understudy.privacy.curator import Curator
from understudy.privacy.gradients import GradientRows, Loss

AT_ONCE = 256


class Onlooker:
    """What a method takes for its curator.

    Args:
        curator: the real one.
        images: of the canaries, in or out, bytes.
        labels: theirs.
    """

    def __init__(self, curator: Curator, images: Tensor, labels: Tensor) -> None:
        device = curator.engine.device
        self._curator = curator
        self._images, self._labels = images.to(device).float() / 255, labels.to(device)
        self._scores = torch.zeros(len(labels), dtype=torch.float64, device=device)
        self.has_looked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._curator, name)

    def scores(self) -> NDArray[np.float64]:
        """Return how much what was released looks like each canary's doing."""
        return self._scores.cpu().numpy()

    def gradient(
        self, loss: Loss, params: Params, public: Params | None = None, **asked: Any
    ) -> Params:
        """Pass on; compare the answer with each canary's own gradient."""
        answer, self.has_looked = self._curator.gradient(loss, params, public, **asked), True
        released = torch.cat([part.flatten() for part in answer.values()]).double()
        known = public or {}
        rows_of = GradientRows(loss, public=known)
        for start in range(0, len(self._labels), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            rows = rows_of(params | known, self._images[some], self._labels[some])
            flat = torch.cat([block.flatten(1) for block in rows], dim=1).double()
            # What canaries have in common tells none of them from another.
            own = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-12)
            self._scores[some] += (own - own.mean(0)) @ released
        return answer
