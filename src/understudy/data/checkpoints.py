"""Files of weights that other programs have written, read as data and never as programs.

Many of them are pickles: small programs, which can name any function to be called on loading, and
without calling anything can fill all memory with a few bytes. Two readers refuse that: torch's own
for its files, and one of ours for pickles of NumPy arrays, which knows the few operations that
writing down arrays takes, and no other.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from understudy.errors import MissingWeights
from understudy.text import one_line

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
        whole = _rewritten(content) if zipfile.is_zipfile(io.BytesIO(content)) else content
        loaded = torch.load(io.BytesIO(whole), weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds for damaged files
        raise MissingWeights(_unreadable(what, error)) from None
    if not isinstance(loaded, dict) or not all(_is_weight(*item) for item in loaded.items()):
        raise MissingWeights(_unreadable(what, "it holds other things than tensors"))
    if sum(weight.numel() * weight.element_size() for weight in loaded.values()) > len(content):
        raise MissingWeights(_unreadable(what, "its tensors claim more than it holds"))
    return dict(loaded)


def _rewritten(content: bytes) -> bytes:
    """Write an archive again, as torch writes them: not packed, every member once.

    What a damaged one says of its members' sizes torch would take at its word, and make room for.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as found, zipfile.ZipFile(made, "w") as archive:
        members = found.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it is packed")
        if sum(member.file_size for member in members) > len(content):
            raise ValueError("its members claim more than it holds")
        if len({member.filename for member in members}) < len(members):
            raise ValueError("it holds a member twice")
        for member in members:
            archive.writestr(member.filename, found.read(member))
    return made.getvalue()


def _is_weight(name: object, value: object) -> bool:
    """Say whether it is an ordinary tensor: not sparse, nested, or without values."""
    if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return cast(Tensor, value).layout is torch.strided and cast(Tensor, value).device.type == "cpu"


def read_arrays(content: bytes, what: str) -> Tree:
    """Read a pickle of NumPy arrays of floats, nested in dictionaries with names as keys.

    Raises:
        MissingWeights: it is damaged, or holds or calls anything else.
    """
    try:
        return _Tensors(len(content)).of(_Pickle().read(content))
    except Exception as error:  # of many kinds for damaged files
        raise MissingWeights(_unreadable(what, error)) from None


def _unreadable(what: str, reason: object) -> str:
    return (
        f"{what} cannot be read as weights ({one_line(reason)}); expected arrays of floats and "
        "nothing else; remove it and fetch it again"
    )


class _Kind:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: object = None, *_: object) -> None:
        if not isinstance(code, str) or code not in KINDS:
            raise ValueError("an array of another type than floats")
        self.code, self.order = code, "="

    def build(self, state: tuple[Any, ...]) -> None:
        if not isinstance(state[1], str) or state[1] not in BYTE_ORDERS:
            raise ValueError("an array of an unknown byte order")
        self.order = state[1]


class _Array:
    """Stands for `numpy.ndarray`."""

    def __init__(self, *_: object) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def build(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _Kind) or not isinstance(content, bytes):
            raise ValueError("an array of other things than floats")
        if not all(isinstance(side, int) and side >= 0 for side in shape):
            raise ValueError("an array of a shape that is none")
        flat = np.frombuffer(content, np.dtype(kind.order + kind.code))
        self.values = flat.reshape(shape, order="F" if is_fortran is True else "C")


STAND_INS: dict[tuple[object, ...], type[_Array | _Kind]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
WRITTEN_OUT = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
     "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
)  # fmt: skip
"""Opcodes whose argument is the value."""


class _Pickle:
    """A stack machine like that of `pickle`, with 25 of its opcodes.

    Each takes time and memory that its own bytes pay for. Keys of dictionaries are text, so that
    they cannot be made to collide, nor be tuples that share their parts and take for ever to hash.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}  # not a list, which one large index would make long

    def read(self, content: bytes) -> object:
        """Return the value that a pickle describes."""
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in WRITTEN_OUT:
                self.stack.append(argument)
            else:
                getattr(self, f"do_{name.lower()}", self.refuse)(argument)
        raise ValueError("it ends too soon")

    def refuse(self, _: object) -> None:
        raise ValueError("it does what no file of arrays needs")

    def do_proto(self, _: object) -> None:
        pass

    do_frame = do_proto

    def do_mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def do_tuple(self, _: object) -> None:
        self.stack.append(tuple(self.since_mark()))

    def do_tuple1(self, _: object) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def do_tuple2(self, _: object) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def do_tuple3(self, _: object) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def do_empty_dict(self, _: object) -> None:
        self.stack.append({})

    def do_setitem(self, _: object) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.put_in([key, value])

    def do_setitems(self, _: object) -> None:
        self.put_in(self.since_mark())

    def put_in(self, items: list[Any]) -> None:
        keys, target = items[::2], self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in keys):
            raise ValueError("it holds other things than arrays by name")
        target.update(zip(keys, items[1::2], strict=True))

    def do_memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_binput(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def do_binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    do_long_binput, do_long_binget = do_binput, do_binget

    def do_global(self, names: str) -> None:
        self.lend(*names.split(" ", 1))

    def do_stack_global(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.lend(module, name)

    def lend(self, *names: object) -> None:
        if not all(isinstance(name, str) for name in names) or names not in STAND_INS:
            raise ValueError(f"it asks for {'.'.join(map(str, names)):.100}, which is refused")
        self.stack.append(STAND_INS[names])

    def do_reduce(self, _: object) -> None:
        arguments, lent = self.stack.pop(), self.stack.pop()
        if lent not in (_Array, _Kind) or not isinstance(arguments, tuple):
            raise ValueError("it calls what it may not")
        self.stack.append(lent(*arguments))

    def do_build(self, _: object) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Kind) or not isinstance(state, tuple):
            raise ValueError("it builds what it may not")
        self.stack[-1].build(state)


class _Tensors:
    """Turns arrays into tensors, each once: parts may be shared, and shared again."""

    def __init__(self, file_bytes: int) -> None:
        self.room = 2 * file_bytes  # half precision becomes single
        self.made: dict[int, Any] = {}

    def of(self, found: object) -> Tree:
        if not isinstance(found, dict):
            raise ValueError("it holds other things than arrays")
        if id(found) not in self.made:
            self.made[id(found)] = None  # being made: one that holds itself is refused below
            self.made[id(found)] = {key: self.part(value) for key, value in found.items()}
        if self.made[id(found)] is None:
            raise ValueError("a part of it holds itself")
        return cast(Tree, self.made[id(found)])

    def part(self, found: object) -> object:
        if not isinstance(found, _Array) or found.values is None:
            return self.of(found)
        if id(found) not in self.made:
            self.room -= 4 * found.values.size
            if self.room < 0:
                raise ValueError("its arrays claim more than it holds")
            self.made[id(found)] = torch.from_numpy(np.array(found.values, dtype=np.float32))
        return self.made[id(found)]
