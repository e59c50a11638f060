"""Files of weights that other programs have written, read as data and never as programs.

Many of them are pickles, which can name any function to be called on loading. Two readers refuse
that: torch's own for its files, and one of ours for pickles of NumPy arrays. Ours lends names to
its own stand-ins only: not even NumPy's functions are called by a file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from understudy.errors import MissingWeights

BYTE_ORDERS = ("<", ">", "=")
KINDS = ("f2", "f4", "f8")
Tree = Mapping[str, Any]
"""Tensors, nested in dictionaries."""


def read_state_dict(content: bytes, what: str) -> dict[str, Tensor]:
    """Read a file that `torch.save` wrote of a module's parameters.

    Raises:
        MissingWeights: it is damaged, or holds anything but tensors.
    """
    try:
        loaded = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds for damaged files
        raise MissingWeights(_unreadable(what, error)) from None
    if not isinstance(loaded, dict) or not all(isinstance(w, Tensor) for w in loaded.values()):
        raise MissingWeights(_unreadable(what, "it holds other things than tensors"))
    return dict(loaded)


def read_arrays(content: bytes, what: str) -> Tree:
    """Read a pickle of NumPy arrays of floats, nested in dictionaries with names as keys.

    Raises:
        MissingWeights: it is damaged, or holds or calls anything else.
    """
    try:
        return _tensors(_ArrayUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # of many kinds for damaged files
        raise MissingWeights(_unreadable(what, error)) from None


def _unreadable(what: str, reason: object) -> str:
    lines = str(reason).strip().splitlines()
    said = lines[0] if lines else type(reason).__name__
    return (
        f"{what} cannot be read as weights ({said}); expected arrays of floats and nothing else; "
        "remove it and fetch it again"
    )


class _Kind:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in KINDS:
            raise pickle.UnpicklingError(f"an array of type {code!r:.20}")
        self.code = code
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in BYTE_ORDERS:
            raise pickle.UnpicklingError(f"an array of byte order {state[1]!r:.20}")
        self.order = state[1]


class _Array:
    """Stands for `numpy.ndarray`."""

    def __init__(self, *_: object) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _Kind) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of other things than floats")
        flat = np.frombuffer(content, np.dtype(kind.order + kind.code))
        self.values = flat.reshape(shape, order="F" if is_fortran else "C")


class _ArrayUnpickler(pickle.Unpickler):
    STAND_INS = {  # noqa: RUF012
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Kind,
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return self.STAND_INS[module, name]


def _tensors(found: object) -> Tree:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise pickle.UnpicklingError("it holds other things than arrays")
    tree: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, _Array) and value.values is not None:
            tree[key] = torch.from_numpy(np.array(value.values, dtype=np.float32))
        else:
            tree[key] = _tensors(value)
    return cast(Tree, tree)
