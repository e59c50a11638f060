"""Small files that claim, or unpack to, more than a machine has: `python -m tests.fuzz.bombs`.

Each is read by a process that gets little memory beyond what its libraries take.
"""

from __future__ import annotations

import gzip
import io
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from .readers import CORPUS, READERS

sys.path.append(str(Path(__file__).parents[1]))
from sources import encoded, idx_bytes, png_claiming

MEGABYTE = 2**20
MORE_ADDRESSES, MORE_MEMORY = 1024 * MEGABYTE, 300 * MEGABYTE
LARGE = 2**40


def bombs() -> Iterator[tuple[str, str, bytes]]:
    """Yield (what, reader, content)."""
    claim = struct.pack(">IIII", 0x803, 2**32 - 1, 2**8, 1)
    yield "a terabyte of pixels", "idx", claim + bytes(1000)
    yield "a terabyte of pixels, packed", "idx", gzip.compress(claim + bytes(1000))
    yield "a gigabyte of zeros", "idx", gzip.compress(idx_bytes(np.zeros((1, 4, 4))) + bytes(2**26))
    yield "an array of a terabyte", "npz", _npz(lambda content: content)
    yield "its size in the archive's table too", "npz", _npz(_lying)
    yield "an image of 3.6 gigapixels", "images", png_claiming(60_000, 60_000)
    yield "labels of a megabyte each", "parquet", _parquet()
    yield "a memo of 2**31 places", "arrays", b"\x80\x04}r\xff\xff\xff\x7f."
    yield "2**60 dictionaries", "arrays", shared(60)
    yield "many arrays of the same bytes", "arrays", of_the_same_bytes(90)
    yield "a key that takes 2**60 steps to hash", "arrays", _pickled(b"})", b"q\x00h\x00\x86" * 60,
                                                                     b"K\x01s")  # fmt: skip
    yield "bytes without end", "arrays", b"\x80\x04\x8e" + struct.pack("<Q", LARGE) + b"x."
    yield "a tensor of a terabyte", "state_dict", _state_dict()
    yield "lists in lists", "certificate", b"[" * 100_000
    yield "lists in lists", "config", b"a = " + b"[" * 50_000
    yield "runs without end", "experiment", _experiment()
    yield "classes in lists in lists", "set", _set("[" * 50_000)
    yield "a header of a terabyte", "set", struct.pack("<Q", LARGE) + b"{}"


def _npz(change) -> bytes:
    text = str({"descr": "|u1", "fortran_order": False, "shape": (LARGE, 1, 8, 8)}).ljust(117)
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("images.npy", "labels.npy"):
            archive.writestr(name, body + bytes(500))
    return change(made.getvalue())


def _lying(content: bytes) -> bytes:
    """Let the archive's table claim that each member takes four gigabytes."""
    changed, place = bytearray(content), 0
    while (place := content.find(b"PK\x01\x02", place + 1)) > 0:
        changed[place + 20 : place + 28] = struct.pack("<II", 2**32 - 2, 2**32 - 2)
    return bytes(changed)


def _parquet() -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    count = 3000
    image = encoded(np.zeros((4, 4), np.uint8))
    text = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["x" * 10**6])
    noise = np.random.default_rng(0).bytes(4000)  # so that the whole does not look packed
    table = pa.table({"image": [image] * count, "label": text, "more": [noise] * count})
    made = io.BytesIO()
    parquet.write_table(
        table, made, compression="zstd", dictionary_pagesize_limit=2**27, store_schema=False
    )
    return made.getvalue()


def _pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def shared(levels: int) -> bytes:
    """Return a dictionary of dictionaries of ..., each held twice by the one above."""
    one = b"}(\x8c\x01ah%c\x8c\x01bh%cuq%c"
    return _pickled(b"}q\x00", b"".join(one % (n, n, n + 1) for n in range(levels)))


def of_the_same_bytes(times: int) -> bytes:
    """Return a dictionary of arrays that all take one stretch of bytes for theirs."""
    zeros = b"B" + struct.pack("<I", 4 * 4096) + bytes(4 * 4096) + b"q\x00"
    kind = b"cnumpy\ndtype\n\x8c\x02f4\x85Rq\x01"
    one = b"\x8c\x02%02dcnumpy\nndarray\n)R(K\x01M\x00\x10\x85h\x01\x89h\x00tbs"
    return _pickled(zeros, kind, b"}", b"".join(one % n for n in range(times)))


def _state_dict() -> bytes:
    made = io.BytesIO()
    torch.save({"a": torch.ones(1).expand(LARGE)}, made)
    return made.getvalue()


def _experiment() -> bytes:
    fields = "\n".join(f"settings.x{n} = [1, 2, 3, 4, 5, 6, 7, 8, 9]" for n in range(20))
    table = '[table]\nrows = ["data"]\n'
    group = f'[runs.a]\nmethod = "psg"\ndata = "digits"\nepsilon = 1\n{fields}\n'
    return f'title = "a"\nsource = "b"\n{table}{group}'.encode()


def _set(names: str) -> bytes:
    tensors = {"images": torch.zeros(2, 1, 4, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    return save_tensors(tensors, metadata={"class_names": names})


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


def main() -> None:
    """Read them all; fail on the first that takes too much."""
    for name in {reader for _, reader, _ in bombs()}:  # libraries take what they take
        for path in (CORPUS / name).glob("intact*"):
            READERS[name].check(path.read_bytes())
    made = list(bombs())
    limit = _status("VmSize") + MORE_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # forget the most memory so far
    before = _status("VmHWM")
    for what, name, content in made:
        assert len(content) < MEGABYTE, what
        started = time.process_time()
        READERS[name].check(content)
        taken = _status("VmHWM") - before
        assert taken < MORE_MEMORY, f"{name}: {what} takes {taken // MEGABYTE} MiB"
        print(f"{name}: {what}: {time.process_time() - started:.1f} s")
    print(f"{len(made)} read in {taken // MEGABYTE} MiB")


if __name__ == "__main__":
    main()
