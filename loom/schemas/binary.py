"""Avro binary of an Envelope, straight line: the path that every event takes (docs/benchmarks.md).

It writes and reads exactly what ``envelope.avsc`` says, byte for byte as a generic Avro library does (a test compares
the two on every kind of envelope); all other records, and envelopes of other schemas, go through that library.
"""

# ruff: noqa: PLR2004 - 0x80 and its kin are Avro's variable-length integers
from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from loom.errors import DecodeError, InvalidInputError
from loom.schemas.envelope import Envelope, Json
from loom.schemas.payload import dump, load_object

TYPED_METADATA: Final = frozenset({"node", "actor", "schema", "seal", "quarantine"})
"""Metadata keys that have a field of their own in the schema; the others stand together in ``metadata``."""

MAX_LONG: Final = 2**63 - 1
MAX_INT: Final = 2**31 - 1

_NULL: Final = b"\x00"
_PRESENT: Final = b"\x02"
_SEAL_FIELDS: Final = {"v", "cipher", "covers"}
_QUARANTINE_FIELDS: Final = {"topic", "inboxSeq"}


def write_long(number: int) -> bytes:
    """Return the zigzag varint of a 64-bit integer."""
    z = number << 1 if number >= 0 else (-number << 1) - 1
    if z < 0x80:
        return _SHORT[z]
    out = bytearray()
    while z > 0x7F:
        out.append(z & 0x7F | 0x80)
        z >>= 7
    out.append(z)
    return bytes(out)


_SHORT: Final = tuple(bytes((z,)) for z in range(0x80))
_LENGTHS: Final = tuple(write_long(n) for n in range(512))


def _prefixed(raw: bytes) -> bytes:
    length = len(raw)
    return (_LENGTHS[length] if length < len(_LENGTHS) else write_long(length)) + raw


def _optional_text(text: str | None) -> bytes:
    return _NULL if text is None else _PRESENT + _prefixed(text.encode())


def write_envelope(prefix: bytes, envelope: Envelope) -> bytes:
    """Return ``prefix`` and the envelope's Avro binary.

    A typed metadata key whose value is None counts as absent.

    Raises:
        InvalidInputError: a field is not of its type, or data or metadata are no JSON.
    """
    try:
        metadata = envelope.metadata
        get = metadata.get
        rest = None if metadata.keys() <= TYPED_METADATA else _untyped(metadata)
        seal, quarantine = get("seal"), get("quarantine")
        return b"".join(
            (
                prefix,
                _prefixed(envelope.id.encode()),
                _prefixed(envelope.stream_id.encode()),
                write_long(_number(envelope.sequence, 0, MAX_LONG)),
                _prefixed(envelope.type.encode()),
                _timestamp(envelope.timestamp),
                _prefixed(_object(envelope.data)),
                _NULL if rest is None else _PRESENT + _prefixed(dump(rest, "event metadata")),
                _optional_text(get("node")),
                _optional_text(get("actor")),
                _optional_text(get("schema")),
                _NULL if seal is None else _write_seal(seal),
                _NULL if quarantine is None else _write_quarantine(quarantine),
            )
        )
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise InvalidInputError(
            "event envelope",
            f"a field is not of its type ({type(error).__name__})",
            "see loom/schemas/envelope.avsc",
        ) from None  # whose text may quote the field


@lru_cache(64, typed=True)  # events of one batch share theirs
def _timestamp(milliseconds: int) -> bytes:
    return write_long(_number(milliseconds, -MAX_LONG, MAX_LONG))


def _object(data: dict[str, Json]) -> bytes:
    if not isinstance(data, dict):
        raise TypeError("data is no mapping")
    return dump(data, "event data")


def _untyped(metadata: dict[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in metadata.items() if key not in TYPED_METADATA}


def _write_seal(seal: dict[str, Any]) -> bytes:
    if seal.keys() != _SEAL_FIELDS or not isinstance(seal["covers"], list | tuple):
        raise ValueError("the seal marker has other fields than v, cipher and covers")
    return _seal(_number(seal["v"], -MAX_INT, MAX_INT), seal["cipher"], tuple(seal["covers"]))


@lru_cache(1024)  # a fleet writes few, many times over
def _seal(version: int, cipher: str, covers: tuple[str, ...]) -> bytes:
    parts = [_PRESENT, write_long(version), _prefixed(cipher.encode())]
    if covers:
        parts.append(write_long(len(covers)))
        parts.extend(_prefixed(pattern.encode()) for pattern in covers)
    parts.append(_NULL)
    return b"".join(parts)


def _write_quarantine(stamp: dict[str, Any]) -> bytes:
    if stamp.keys() != _QUARANTINE_FIELDS:
        raise ValueError("the quarantine stamp has other fields than topic and inboxSeq")
    return (
        _PRESENT
        + _prefixed(stamp["topic"].encode())
        + write_long(_number(stamp["inboxSeq"], -MAX_LONG, MAX_LONG))
    )


def _number(value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise TypeError("a number is none, or out of range")
    return value


def read_long(raw: bytes, at: int) -> tuple[int, int]:
    """Return the zigzag varint at ``at`` and the position after it.

    Raises:
        IndexError: the bytes end inside it. ValueError: it is longer than 64 bits.
    """
    byte = raw[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    z = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        byte = raw[at]
        at += 1
        z |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise ValueError("a number longer than 64 bits")
    if z >> 64:
        raise ValueError("a number longer than 64 bits")
    return (z >> 1) ^ -(z & 1), at


def _read_bytes(raw: bytes, at: int) -> tuple[bytes, int]:
    length = raw[at]
    if length < 0x80 and not length & 1:
        length >>= 1
        at += 1
    else:
        length, at = read_long(raw, at)
    end = at + length
    if length < 0 or end > len(raw):
        raise ValueError("a length beyond the end")
    return raw[at:end], end


def _read_optional_text(raw: bytes, at: int) -> tuple[str | None, int]:
    if not _is_present(raw, at):
        return None, at + 1
    text, at = _read_bytes(raw, at + 1)
    return text.decode(), at


def _is_present(raw: bytes, at: int) -> bool:
    branch = raw[at]
    if branch == 0:
        return False
    if branch == 2:
        return True
    raise ValueError("an unknown branch")


def read_envelope(raw: bytes, at: int, what: str = "event") -> Envelope:
    """Return the envelope whose Avro binary starts at ``at`` and ends with ``raw``.

    Raises:
        DecodeError: it is none, or bytes follow it.
    """
    try:
        event_id, at = _read_bytes(raw, at)
        stream_id, at = _read_bytes(raw, at)
        sequence, at = read_long(raw, at)
        kind, at = _read_bytes(raw, at)
        timestamp, at = read_long(raw, at)
        data, at = _read_bytes(raw, at)
        metadata: dict[str, Json] = {}
        if _is_present(raw, at):
            rest, at = _read_bytes(raw, at + 1)
            metadata = untyped_object(rest, what)
        else:
            at += 1
        for key in ("node", "actor", "schema"):
            text, at = _read_optional_text(raw, at)
            if text is not None:
                metadata[key] = text
        if raw[at : at + 2] == b"\x00\x00":
            at += 2
        else:
            at = _read_markers(raw, at, metadata)
        _check_end(raw, at, sequence)
        return Envelope(
            event_id.decode(),
            stream_id.decode(),
            sequence,
            kind.decode(),
            timestamp,
            load_object(data, what),
            metadata,
        )
    except (IndexError, ValueError) as error:
        raise DecodeError(what, _problem(error)) from None


def _check_end(raw: bytes, at: int, sequence: int) -> None:
    if at != len(raw) or sequence < 0:
        raise ValueError("bytes after the record, or a negative sequence")


def _read_markers(raw: bytes, at: int, metadata: dict[str, Json]) -> int:
    present, at = _is_present(raw, at), at + 1
    if present:
        version, at = read_long(raw, at)
        cipher, at = _read_bytes(raw, at)
        covers, at = _read_texts(raw, at)
        if abs(version) > MAX_INT:
            raise ValueError("a number out of range")
        metadata["seal"] = {"v": version, "cipher": cipher.decode(), "covers": covers}
    present, at = _is_present(raw, at), at + 1
    if present:
        topic, at = _read_bytes(raw, at)
        inbox_seq, at = read_long(raw, at)
        metadata["quarantine"] = {"topic": topic.decode(), "inboxSeq": inbox_seq}
    return at


def _read_texts(raw: bytes, at: int) -> tuple[list[str], int]:
    texts: list[str] = []
    count, at = read_long(raw, at)
    while count:
        if count < 0:  # a block that tells its size
            count = -count
            _, at = read_long(raw, at)
        for _ in range(count):  # ends at the latest where the bytes end
            text, at = _read_bytes(raw, at)
            texts.append(text.decode())
        count, at = read_long(raw, at)
    return texts, at


def untyped_object(raw: bytes, what: str) -> dict[str, Json]:
    """Return the metadata that has no field of its own.

    Raises:
        DecodeError: no JSON object, or a typed key among them: it would contradict, or forge, its field.
    """
    rest = load_object(raw, what)
    if not TYPED_METADATA.isdisjoint(rest):
        raise DecodeError(what, "its metadata repeats a typed field")
    return rest


def _problem(error: Exception) -> str:
    if isinstance(error, IndexError):
        return "the bytes end inside the record"
    if isinstance(error, UnicodeError):
        return "a text is not UTF-8"
    return "no record of its schema"
