"""Damage that knows the format: it gets past checksums and parsers to what lies behind them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import pickletools
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from understudy.files import canonical_json

Mutation = Callable[[bytes, Random], bytes]
MOST_BYTES = 2**16
"""Inputs are kept below this: what takes long or much for so few is a finding."""

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -0.0, 0.5, 1e-320, 1e308, "", "a",
    "\x1b[2J", "../../x", "/etc/passwd", "\u202egnp", "a\nb", "\ud800", "9" * 5000, "x" * 3000,
    [], {}, [[]], [0, 0], ["a", "a"], {"a": 1}, "float32", "pld",
)  # fmt: skip
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "[" * 3000 + "]" * 3000, "9" * 5000, "[" * 30000)
"""JSON that no value is written as."""
TEXT = (
    *(b'"', b"'", b",", b";", b"\n", b"\r", b"\0", b"\t", b"=", b"[", b"]", b"{", b"}", b"[["),
    *(b"#", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[31m", b"../", b"file", b"label"),
    *(b"nan", b"inf", b"-1", b"1e400", b"0x7f", b"1979-05-27", b"true", b'""', b"'''", b"[" * 3000),
    *(b"9" * 5000, b"a." * 3000, b"{a=" * 2000, "\u202e".encode(), "²".encode()),
)  # fmt: skip
OPCODES = (
    *(b"cos\nsystem\n(S'true'\ntR", b"\x8c\x02os\x8c\x06system\x93", b"cbuiltins\neval\n", b"("),
    *(b"r\xff\xff\xff\x7f", b"p2147483647\n", b"j\xff\xff\xff\x7f", b"h\x00", b"\x94", b"2", b"0"),
    *(b"}", b")", b"t", b"R", b"b", b"s", b"u", b"\x85", b"\x86", b"\x87", b"N", b"K\x01", b"."),
    *(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x00", b"\x8b\xff\xff\xff\x7f", b"I1\n", b"Q", b"P1\n"),
    *(b"\x81", b"o", b"i", b"\x92", b"\x82\x01", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"),
    *(b"2\x86" * 60, b"2\x86" * 60 + b"K\x01s", b"]", b"\x8f", b"l", b"d", b"\x95" + b"\xff" * 8),
)  # fmt: skip
MEMBERS = (
    *("data_batch_1.bin", "test_batch.bin", "train_lables.json", "test_lables.json"),
    *("data_batch_1.png", "test_batch.png", "../data_batch_1.bin", "/tmp/data_batch_1.bin"),
    *("data_batch_2.bin.gz", "..", ".", "", "a/../../b", "x" * 300 + ".bin", "\x00.bin"),
)  # fmt: skip
KINDS = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
         tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE)  # fmt: skip


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """Change a few places: cut, set, insert, drop, repeat, or write an unlikely number."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(changed))
        much = random.choice((1, 2, 4, 9, 200))
        match random.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                changed[at : at + 1] = bytes([random.randrange(256)])
            case 2:
                changed[at:at] = random.randbytes(much)
            case 3:
                del changed[at : at + much]
            case 4:
                changed[at:at] = changed[at : at + much] * random.choice((1, 20))
            case 5:
                form = random.choice(("<I", ">I", "<Q", ">Q", "<H", ">H", "B"))
                number = random.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form))
                changed[at : at + struct.calcsize(form)] = struct.pack(form, number)
    return bytes(changed[:MOST_BYTES])


def mutate_text(content: bytes, random: Random) -> bytes:
    """Put in signs that text formats give a meaning to."""
    if random.random() < 0.3:
        return mutate_bytes(content, random)
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(content))
        drop = random.choice((0, 0, 1, 5))
        content = content[:at] + random.choice(TEXT) + content[at + drop :]
    return content[:MOST_BYTES]


def maybe_gzipped(content: bytes, random: Random) -> bytes:
    """Change what is inside, or the file; pack it or not."""
    if content[:2] == b"\x1f\x8b" and random.random() < 0.5:
        with contextlib.suppress(OSError, EOFError, zlib.error):
            inside = gzip.decompress(content)[:MOST_BYTES]
            return gzip.compress(mutate_bytes(inside, random), 1)
    changed = mutate_bytes(content, random)
    return gzip.compress(changed, 1) if random.random() < 0.1 else changed


def mutate_json(content: bytes, random: Random) -> bytes:
    """Change values, names and nesting of a JSON text."""
    if random.random() < 0.2:
        return mutate_text(content, random)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return mutate_text(content, random)
    for _ in range(random.randint(1, 3)):
        tree = _changed(tree, random)
    return _json(tree, random)[:MOST_BYTES]


def _json(tree: Any, random: Random, **how: Any) -> bytes:
    text = json.dumps(tree, **how)
    if random.random() < 0.2:  # what `dumps` never writes
        marker = json.dumps("here")
        text = json.dumps(_changed(tree, random, "here"), **how)
        text = text.replace(marker, random.choice(RAW), 1)
    return text.encode()


def _changed(tree: Any, random: Random, by: Any = ...) -> Any:
    """Return a JSON value with one part of it changed."""
    if isinstance(tree, dict | list) and tree and random.random() < 0.85:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = random.choice(keys)
        copy = tree.copy()
        match random.randrange(10):
            case 0 if by is ...:
                del copy[key]
            case 1 if by is ... and isinstance(copy, dict):
                copy[random.choice(("x", "../x", "", "a/b", "\x1b", key + "2"))] = copy.pop(key)
            case _:
                copy[key] = _changed(tree[key], random, by)
        return copy
    if by is not ...:
        return by
    if isinstance(tree, int | float) and abs(tree) < 1e15 and random.random() < 0.4:
        return random.choice((tree + 1, -tree, tree * 2, tree / 2, tree * 1e6))
    if isinstance(tree, str) and random.random() < 0.4:
        return tree + random.choice(("\x1b[2J", "/../x", "\n", "2", "\u202e", "x" * 300))
    return random.choice(VALUES)


def mutate_certificate(content: bytes, random: Random) -> bytes:
    """Change a certificate, and seal it again."""
    if random.random() < 0.1:
        return mutate_json(content, random)
    try:
        tree = json.loads(content)
        for _ in range(random.randint(1, 2)):
            tree = _changed(tree, random)
        tree.pop("seal")
        tree["seal"] = hashlib.sha256(canonical_json(tree)).hexdigest()
        return canonical_json(tree)[:MOST_BYTES]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return mutate_json(content, random)


def mutate_safetensors(content: bytes, random: Random) -> bytes:
    """Change the header, also the descriptions written in it as text, or the bytes behind it."""
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    if random.random() < 0.2:
        return mutate_bytes(content, random)
    try:
        tree = json.loads(header)
        about = tree.get("__metadata__")
        if about and random.random() < 0.7:
            key = random.choice(list(about))
            about[key] = mutate_json(about[key].encode(), random).decode("utf-8", "replace")
        else:
            tree = _changed(tree, random)
        text = _json(tree, random, separators=(",", ":"))
    except (ValueError, RecursionError, AttributeError, IndexError, TypeError):
        text = mutate_text(header, random)
    if random.random() < 0.2:
        rest = mutate_bytes(rest, random)
    return (len(text).to_bytes(8, "little") + text + rest)[:MOST_BYTES]


def mutate_pickle(content: bytes, random: Random) -> bytes:
    """Drop, repeat, exchange or put in whole opcodes."""
    if random.random() < 0.2:
        return mutate_bytes(content, random)
    places = [0]
    with contextlib.suppress(Exception):
        places = [at for _, _, at in pickletools.genops(content) if at is not None]
    parts = [content[a:b] for a, b in zip(places, [*places[1:], len(content)], strict=True)]
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(parts)) if parts else 0
        match random.randrange(4):
            case 0:
                del parts[at : at + 1]
            case 1:
                parts[at:at] = parts[at : at + random.choice((1, 3, 20))]
            case 2:
                parts[at:at] = [random.choice(OPCODES)]
            case 3:
                parts[at : at + 1] = [random.choice(parts or [b"."])]
    return b"".join(parts)[:MOST_BYTES]


def mutate_zip(content: bytes, random: Random, inside: Mutation) -> bytes:
    """Change a member, its name or how it is packed; or the archive's own tables."""
    if random.random() < 0.3:
        return mutate_bytes(content, random)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(i.filename, archive.read(i)[:MOST_BYTES]) for i in archive.infolist()]
        at = random.randrange(len(members))
        name, old = members[at]
        match random.randrange(6):
            case 0:
                members[at] = (random.choice((*MEMBERS, "images.npy", "labels.npy")), old)
            case 1:
                members.append((name, inside(old, random)))
            case 2:
                del members[at]
            case _:
                members[at] = (name, inside(old, random))
        made = io.BytesIO()
        how = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
        with warnings.catch_warnings(), zipfile.ZipFile(made, "w", how) as archive:
            warnings.simplefilter("ignore")  # a name twice
            for name, body in members:
                archive.writestr(name, body)
    except Exception:  # what no zip file can hold
        return mutate_bytes(content, random)
    return made.getvalue()[:MOST_BYTES]


def mutate_npz(content: bytes, random: Random) -> bytes:
    """Change arrays and their headers in a zip file."""
    return mutate_zip(content, random, _mutate_npy)


DESCRIPTIONS = (
    *("|u1", "<f4", "<f8", "<f2", "|O", "<U5", "<U0", "|S3", "|V0", "<M8[D]", "|b1", "<c16", ">i8"),
    *("<i8", "|V5", "<U100000", "m8", "<u8", "<f16", "[('a', '|O')]", "('<f4', (1000, 1000))"),
    *("[('a', '<f4'), ('b', '|u1')]", "((((((", "(" * 3000, "-" * 3000 + "1", "'<f4'"),
)  # fmt: skip
SHAPES = (
    *("()", "(6,)", "(2,)", "(-1,)", "(0,)", "(2**20,)", "(1099511627776,)", "(6, 4, 4)"),
    *("(6, 4, 4, 3)", "(6, 3, 4, 4)", "(True, 4)", "(1e3,)", "('a',)", "6", "(6, -4, -4)"),
    *("(0, 4611686018427387904, 8)", "(" + "1," * 40 + ")", "(" + "9" * 5000 + ",)", "None"),
)  # fmt: skip


def _mutate_npy(content: bytes, random: Random) -> bytes:
    end = content.find(b"\n")
    if random.random() < 0.3 or content[:6] != b"\x93NUMPY" or end < 0:
        return mutate_bytes(content, random)
    kind, shape = random.choice(DESCRIPTIONS), random.choice(SHAPES)
    kind = kind if kind[:1] in "[(-'" else repr(kind)
    order = random.choice(("True", "False", "1", "None"))
    text = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    version = random.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00"))
    length = struct.pack("<H" if version[0] == 1 else "<I", len(text) % 2**16)
    return b"\x93NUMPY" + version + length + text + content[end + 1 :]


def mutate_zipped_pickle(content: bytes, random: Random) -> bytes:
    """Change the pickle in a zip file, as torch writes them."""
    return mutate_zip(content, random, mutate_pickle)


def mutate_archive(content: bytes, random: Random) -> bytes:
    """Change an archive's members: names that climb, links, devices, bombs."""
    if content[:2] == b"PK":
        return mutate_zip(content, random, mutate_json)
    if random.random() < 0.2:
        return maybe_gzipped(content, random)
    made = io.BytesIO()
    try:
        with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as tar:
            for _ in range(random.randint(1, 4)):
                member = tarfile.TarInfo(random.choice(("", "a/", "../")) + random.choice(MEMBERS))
                member.type = random.choice(KINDS) if random.random() < 0.6 else tarfile.REGTYPE
                member.linkname = random.choice((*MEMBERS, "/etc/passwd"))
                bodies = (b"[1, 2]", b"{}", b"[" * 9000, b"x", content, bytes(3073), b'["a"]')
                body = random.choice(bodies)
                member.size = len(body) if member.isreg() else random.choice((0, 10))
                tar.addfile(member, io.BytesIO(body.ljust(10, b" ")))
    except (ValueError, OSError, tarfile.TarError):
        return maybe_gzipped(content, random)
    return made.getvalue()[:MOST_BYTES]


def mutate_parquet(content: bytes, random: Random) -> bytes:
    """Change the footer or a page, or write a table of other types."""
    if random.random() < 0.3:
        with contextlib.suppress(Exception):  # columns of different lengths, types that clash
            return _hostile_table(random)[:MOST_BYTES]
    (length,) = struct.unpack("<I", content[-8:-4]) if len(content) > 12 else (0,)
    start = max(0, len(content) - 8 - length)
    if random.random() < 0.5:
        return mutate_bytes(content, random)
    footer = mutate_bytes(content[start:-8], random)
    return content[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _hostile_table(random: Random) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    count = random.choice((0, 1, 2, 3, 50))
    cells: tuple[Any, ...] = (
        None, b"", b"x", "a", 0, 1, -1, 2**62, 0.5, float("nan"), True, [1], {"bytes": b"x"},
        {"path": "../x"}, {"bytes": None, "path": None}, "\x1b[2J", "x" * 3000, [[]], "9" * 5000,
    )  # fmt: skip
    columns = {
        name: [random.choice(cells)] * count
        for name in random.sample(("image", "img", "label", "path", "bytes", "a.b"), 3)
    }
    named = '{"info": {"features": {"label": {"names": %s}}}}'
    names = random.choice(("", "[" * 5000, "{}", named % 0, named % '["\\u001b", "a"]')).encode()
    table = pa.table(columns).replace_schema_metadata({b"huggingface": names})
    made = io.BytesIO()
    parquet.write_table(table, made, compression=random.choice(("none", "zstd", "gzip")))
    return made.getvalue()
