"""Golden records: bytes that a release wrote, and how every later one must read them.

``loom/schemas/golden/<release>/<name>.bin`` is a record value, ``<name>.json`` its reading. A file, once committed,
never changes: a change of the format gets a new release folder beside it. ``python tests/schemas/golden.py`` writes the
files that are missing, for a new case or a new release, and leaves those that exist.
"""

import json
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import fastavro

import loom.schemas
from loom.schemas import EVENT_SCHEMA, Envelope
from loom.schemas.codec import Codec, decode, encode
from loom.schemas.payload import dump

SCHEMAS = Path(loom.schemas.__file__).parent
GOLDEN = SCHEMAS / "golden"
LEGACY = "1.24.0"
REGISTRY_ID = 258
T = 1_732_000_000_000
CHAIN = "01JD0000000000000000000000"
INBOX = f"__loom_inbox__:{CHAIN}:ship"
NODE = "host-1:01JCZZZZZZZZZZZZZZZZZZZZZZ"


def events(schema):
    """The main job as either release writes it: they differ in nothing but the stamp."""
    stamp = {"node": NODE, "schema": schema}
    by_alice = {**stamp, "actor": "alice"}
    log = [
        ("EXECUTION_STARTED", {"workflow": "order", "input": {"card": "tok", "total": 12.5}, "chainId": CHAIN, "subject": CHAIN, "principal": {"actor": "alice", "identity": {"groups": ["b", "a"]}}}, by_alice),
        ("DECISION_RECORDED", {"siteId": "0:0", "kind": "random", "value": 0.1}, stamp),
        ("STEP_FAILED", {"siteId": "0:1", "name": "charge", "error": {"type": "Timeout", "message": "späť"}, "attempt": 1, "final": False, "retryAt": T + 500}, stamp),
        ("STEP_COMPLETED", {"siteId": "0:1", "name": "charge", "output": {"id": 2**70, "ok": True, "note": None}, "attempt": 2}, stamp),
        ("EXECUTION_SUSPENDED", {"waits": [{"siteId": "0:2", "arms": [{"kind": "inbox", "topic": "ship"}, {"kind": "timer", "wakeAt": T + 86_400_000}]}]}, stamp),
        ("MESSAGE_CONSUMED", {"siteId": "0:2", "arm": 0, "topic": "ship", "messageId": "ab" * 32, "inboxSeq": 0, "payload": {"carrier": "日本"}}, stamp),
        ("EXECUTION_RESUMED", {"siteId": "0:2", "arm": 0, "kind": "inbox"}, {**stamp, "traceparent": "00-4bf9-01", "attempt": 3}),
        ("EXECUTION_COMPLETED", {"output": {"receipt": ["a", 1, 2.0, 1e22, -0.0]}}, stamp),
    ]  # fmt: skip
    for sequence, (kind, data, metadata) in enumerate(log):
        yield (
            kind.lower(),
            Envelope(
                f"01JD00000000000000000000{sequence:02d}", CHAIN, sequence, kind, T + sequence, data, metadata
            ),
        )
    yield "inbox_message", Envelope("m-1", INBOX, 0, "INBOX_MESSAGE", T, {"topic": "ship", "payload": {"carrier": "日本"}, "messageId": "m-1", "sender": "wms"}, by_alice)  # fmt: skip


def legacy_cases():
    yield from events(LEGACY)
    yield (
        "unstamped",
        Envelope(
            "e", CHAIN, 0, "EXECUTION_STARTED", T, {"workflow": "order", "input": None, "chainId": CHAIN}, {}
        ),
    )


def current_cases():
    yield from events(EVENT_SCHEMA)
    seal = {"v": 1, "cipher": "aes-256-gcm", "covers": ["INBOX_MESSAGE.payload"]}
    sealed = {"topic": "ship", "payload": {"__loomEnc": "v1.k.n.c"}, "messageId": "m-2"}
    yield "sealed_inbox_message", Envelope("m-2", INBOX, 1, "INBOX_MESSAGE", T, sealed, {"node": NODE, "schema": EVENT_SCHEMA, "seal": seal})  # fmt: skip
    copy = {
        "node": NODE,
        "schema": EVENT_SCHEMA,
        "seal": seal,
        "quarantine": {"topic": "ship", "inboxSeq": 1},
    }
    yield "quarantine_copy", Envelope(f"quarantine:{CHAIN}:k:1", f"__loom_quarantine__:{CHAIN}", 1, "INBOX_MESSAGE", T, sealed, copy)  # fmt: skip
    yield (
        "later_release",
        Envelope("e", CHAIN, 9, "SOMETHING_NEW", T, {"x": 1}, {"schema": "1.26.3", "novel": {"a": [1]}}),
    )


def reading(envelope):
    return {"release": envelope.metadata.get("schema"), **asdict(envelope)}


def legacy_bytes(envelope):
    """What 1.24.0 wrote: its own schema, by a stock Avro library."""
    schema = fastavro.parse_schema(
        json.loads((SCHEMAS / "history" / "envelope-1.24.0.avsc").read_text(encoding="utf-8"))
    )
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    stream = BytesIO(b"\xc3\x01" + bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")))
    stream.seek(10)
    typed = {key: envelope.metadata.get(key) for key in ("node", "actor", "schema")}
    rest = {key: value for key, value in envelope.metadata.items() if key not in typed}
    fields = {
        "id": envelope.id,
        "streamId": envelope.stream_id,
        "sequence": envelope.sequence,
        "type": envelope.type,
        "timestamp": envelope.timestamp,
        "data": dump(envelope.data),
        "metadata": dump(rest) if rest else None,
        **typed,
    }
    fastavro.schemaless_writer(stream, schema, fields, strict=True)
    return stream.getvalue()


def record_cases():
    """The fullest example of each record beside envelopes."""
    from schema_strategies import RECORDS

    fullest = {}
    for record in RECORDS:
        name = type(record).__name__
        if name not in fullest or len(encode(record)) > len(encode(fullest[name])):
            fullest[name] = record
    return fullest.items()


def _write(folder, name, raw, as_read):
    folder.mkdir(parents=True, exist_ok=True)
    binary, text = folder / f"{name}.bin", folder / f"{name}.json"
    if not binary.exists():
        binary.write_bytes(raw)
        text.write_text(
            json.dumps(as_read, ensure_ascii=False, indent=1, default=_bytes) + "\n", encoding="utf-8"
        )


def _bytes(value):
    return {"hex": value.hex()}


def main():
    for name, envelope in legacy_cases():
        _write(GOLDEN / LEGACY, name, legacy_bytes(envelope), reading(envelope))
    codec, registered = Codec(), Codec(registered={"loom.Envelope": REGISTRY_ID})
    for name, envelope in current_cases():
        _write(GOLDEN / EVENT_SCHEMA, name, codec.encode_envelope(envelope), reading(envelope))
    name, envelope = next(current_cases())
    _write(GOLDEN / f"{EVENT_SCHEMA}-registry", name, registered.encode_envelope(envelope), reading(envelope))
    for name, record in record_cases():
        assert decode(encode(record), type(record)) == record
        _write(GOLDEN / f"{EVENT_SCHEMA}-records", name, encode(record), asdict(record))


if __name__ == "__main__":
    main()
