"""Public randomness: a generator for each purpose, derived from `--seed` and nothing else.

Deriving instead of drawing in sequence means that a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib

import torch


def public_generator(seed: int, *purpose: object) -> torch.Generator:
    """Return the generator for `purpose` under `seed`; the same arguments give the same draws.

    >>> a, b = (torch.rand(1, generator=public_generator(0, "network", 3)) for _ in range(2))
    >>> bool(a == b)
    True
    """
    text = "/".join(map(str, (seed, *purpose)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
