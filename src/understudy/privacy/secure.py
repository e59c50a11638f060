"""Secret draws from a cipher, for whoever does not want to trust that Philox cannot be inverted.

The bits are AES-256 in counter mode, from the package `cryptography`. Every draw has a key of its
own from the operating system, forgotten with the draw: whoever reads this process's memory later
learns nothing of earlier noise, and no counter comes near its end.

Normals are Box and Muller's, in float64. The uniform number that decides how far out a pair lies
has 126 bits where it is small, and 53 significant ones everywhere, so pairs reach 13.3 standard
deviations and are as dense at 10 as float64 is. The cut at 13.3 is a circle around a pair instead
of a box: it is crossed with probability 2^-127, and within a shift s of it falls far less than
falls within s of the box's edge at 10, which `tail_delta` charges.

On a GPU the bits are drawn on the host and copied; there they become normals.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.errors import InvalidSettings, installing
from understudy.privacy.randomness import Gaps, Randomness, SecretRandomness, SecretSource

MASK, UNIT = 2**63 - 1, 2.0**-63
"""The bits of a word that are used, all but the sign; and the last of them, as a part of 1."""
KEY_BYTES, BLOCK_BYTES, WORD_BYTES = 32, 16, 8


def secret_randomness(device: torch.device, *, secure: bool = False) -> SecretSource:
    """Make new secret generators: the usual ones, or a cipher's."""
    return SecureRandomness(device) if secure else SecretRandomness(device)


def is_secure(source: Randomness) -> bool:
    """Say whether draws come from a cipher."""
    return isinstance(source, SecureRandomness)


class SecureRandomness(SecretSource):
    """Draw batches and noise from AES-256-CTR; each draw has a key of its own."""

    __slots__ = ("_ciphers",)

    generator = "AES-256-CTR"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._ciphers = ciphers()

    def _gaps(self, rate: float, count: int) -> Gaps:
        """Draw exponential gaps, and round them up: geometric ones."""
        words = self._words(2 * count, torch.device("cpu")).view(2, count)
        gaps: Gaps = torch.ceil(uniform(*words).log() / math.log1p(-rate)).numpy()
        return gaps

    def normal(self, count: int) -> Tensor:
        """Draw `count` standard normals, in pairs: a distance from zero and an angle."""
        pairs = (count + 1) // 2
        size, finer, turn = self._words(3 * pairs, self._device).view(3, pairs)
        radius = torch.sqrt(-2 * uniform(size, finer).log())
        angle = (turn & MASK).double() * (2 * math.pi * UNIT)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]

    def _words(self, count: int, device: torch.device) -> Tensor:
        """Draw `count` words of 64 bits, int64."""
        room = count + BLOCK_BYTES // WORD_BYTES  # the cipher wants a block to spare
        words = torch.empty(room, dtype=torch.int64, pin_memory=device.type == "cuda")
        key, start = secrets.token_bytes(KEY_BYTES), bytes(BLOCK_BYTES)
        cipher = self._ciphers.Cipher(
            self._ciphers.algorithms.AES(key), self._ciphers.modes.CTR(start)
        )
        cipher.encryptor().update_into(bytes(WORD_BYTES * count), words.numpy().view(np.uint8))
        return words[:count].to(device, non_blocking=True)


def uniform(word: Tensor, finer: Tensor) -> Tensor:
    """Turn two words into a number above 0 and at most 1, exact to 53 significant bits.

    >>> uniform(torch.tensor([0, 2**62, -1]), torch.tensor([0, 0, -1])).log2().tolist()
    [-127.0, -1.0, 0.0]
    """
    least = ((finer & MASK).double() + 0.5) * UNIT
    return ((word & MASK).double() + least) * UNIT


def ciphers() -> Any:
    """Import the package that has the cipher.

    Raises:
        InvalidSettings: it is not installed.
    """
    try:
        import cryptography.hazmat.primitives.ciphers.algorithms
        import cryptography.hazmat.primitives.ciphers.modes
    except ImportError as error:
        raise InvalidSettings(
            f"--secure-noise needs the package cryptography, which cannot be imported ({error}); "
            f"{installing('secure')}"
        ) from error
    return cryptography.hazmat.primitives.ciphers
