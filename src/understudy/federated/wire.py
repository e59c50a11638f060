"""Rounds and answers as Flower records: raw bytes with a declared type and shape, nothing else.

Flower's own arrays are written by `numpy.save`; these are not, so nothing that comes over the wire
is ever parsed but as numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from understudy.errors import RoundDeclined
from understudy.privacy.client import Round

RAW = "understudy.raw"
MOST_BYTES = 2**28
"""Of one message."""
MOST_DIMENSIONS = 8
_TYPES = {"float32": torch.float32, "int64": torch.int64}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client sends back."""

    slope: Tensor | None = None
    """Flat, as the images; None if it was not asked, or declines."""
    declined: str = ""
    """Why there is no answer."""
    noise_multiplier: float = 0.0
    delta: float = 0.0
    """What the client's guarantee is calibrated to; both public."""
    noise_std: float = 0.0
    """Standard deviation of the noise in each number of an answer: public. 0 if it is not told."""


def array_of(tensor: Tensor) -> Any:
    """Pack a tensor."""
    kind = {dtype: name for name, dtype in _TYPES.items()}[tensor.dtype]
    data = tensor.detach().cpu().contiguous().numpy()
    return Array(
        kind, tuple(tensor.shape), RAW, data.astype(data.dtype.newbyteorder("<")).tobytes()
    )


def tensor_of(array: Any) -> Tensor:
    """Unpack a tensor; decline whatever is not exactly what it says."""
    kind, shape, data = array.dtype, tuple(array.shape), array.data
    if array.stype != RAW or kind not in _TYPES:
        raise RoundDeclined(
            f"an array came as {kind!s:.40} by {array.stype!s:.40}, expected float32 or "
            f"int64 by {RAW}"
        )
    dtype = _TYPES[kind]
    reach = math.prod(side for side in shape if side)  # strides count also where nothing lies
    if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0 or reach > 2**60:
        raise RoundDeclined(f"an array has shape {shape}, which is none")
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted or wanted > MOST_BYTES:
        raise RoundDeclined(
            f"an array {kind} {shape} came with {len(data)} bytes, expected {wanted}, and at most "
            f"{MOST_BYTES}"
        )
    if wanted == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def pack_round(asked: Round) -> Any:
    """Write what a client is asked."""
    arrays = {"images": array_of(asked.images), "labels": array_of(asked.labels)}
    said = {"round": asked.name, "is-asked": asked.is_asked}
    return RecordDict({"arrays": ArrayRecord(arrays), "said": ConfigRecord(said)})


def read_round(content: Any) -> Round:
    """Read what a server asks. The client checks it against what it offers."""
    arrays, said = _parts(content, ("images", "labels"))
    name, is_asked = said.get("round"), said.get("is-asked")
    if not isinstance(name, str) or not isinstance(is_asked, bool):
        raise RoundDeclined("a round came without its name, or without saying if it asks")
    return Round(name=name, images=arrays["images"], labels=arrays["labels"], is_asked=is_asked)


def pack_answer(answer: Answer) -> Any:
    """Write what a client answers."""
    arrays = {} if answer.slope is None else {"slope": array_of(answer.slope)}
    said = {
        "declined": answer.declined,
        "noise-multiplier": answer.noise_multiplier,
        "delta": answer.delta,
        "noise-std": answer.noise_std,
    }
    return RecordDict({"arrays": ArrayRecord(arrays), "said": ConfigRecord(said)})


def read_answer(content: Any) -> Answer:
    """Read what a client answers: it may be anybody."""
    arrays, said = _parts(content, ())
    declined = said.get("declined", "")
    numbers = [said.get(name, 0.0) for name in ("noise-multiplier", "delta", "noise-std")]
    if not isinstance(declined, str) or not all(isinstance(n, float) for n in numbers):
        raise RoundDeclined("an answer came that is none")
    return Answer(
        slope=arrays.get("slope"),
        declined="".join(c for c in declined[:500] if c.isprintable()),
        noise_multiplier=numbers[0],
        delta=numbers[1],
        noise_std=numbers[2],
    )


def _parts(content: Any, needed: tuple[str, ...]) -> tuple[dict[str, Tensor], Any]:
    arrays, said = content.get("arrays"), content.get("said")
    if not isinstance(arrays, ArrayRecord) or not isinstance(said, ConfigRecord):
        raise RoundDeclined("a message came without arrays and settings, expected both")
    if missing := [name for name in needed if name not in arrays]:
        raise RoundDeclined(f"a round came without {' and '.join(missing)}")
    if sum(len(array.data) for array in arrays.values()) > MOST_BYTES:
        raise RoundDeclined(f"a message came with over {MOST_BYTES} bytes, expected fewer")
    return {name: tensor_of(array) for name, array in arrays.items()}, said
