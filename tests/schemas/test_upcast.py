"""From the shape of an event as it was written to the one that folds read."""

from dataclasses import replace

import pytest

from loom.errors import DecodeError
from loom.schemas import EVENT_SCHEMA, Envelope, upcast
from loom.schemas.codec import decode_envelope, encode_envelope

PLAIN = Envelope("e", "c", 0, "X", 5, {"a": 1}, {})


@pytest.mark.parametrize("version", ["1.24.0", EVENT_SCHEMA, "1.25.1", "1.26.0", "1.100.7"])
def test_known_and_later_minor_versions_are_read_as_they_are(version):
    envelope = replace(PLAIN, metadata={"schema": version})
    assert decode_envelope(encode_envelope(envelope)) == envelope


@pytest.mark.parametrize(
    "version", ["2.0.0", "1.23.9", "0.1.0", "", "1.25", "1.25.0.0", "1.x.0", "latest", "1.-1.0"]
)
def test_other_versions_are_refused(version):
    raw = encode_envelope(replace(PLAIN, metadata={"schema": version}))
    with pytest.raises(DecodeError, match="event schema is not one that this release reads"):
        decode_envelope(raw)


def test_steps_are_taken_one_after_another(monkeypatch):
    def renamed(envelope):
        data = {("b" if key == "a" else key): value for key, value in envelope.data.items()}
        return replace(envelope, data=data, metadata={**envelope.metadata, "schema": "1.23.0"})

    def doubled(envelope):
        return replace(
            envelope, data={"b": envelope.data["b"] * 2}, metadata={**envelope.metadata, "schema": "1.24.0"}
        )

    monkeypatch.setitem(upcast.STEPS, "1.22.0", ("1.23.0", renamed))
    monkeypatch.setitem(upcast.STEPS, "1.23.0", ("1.24.0", doubled))
    read = decode_envelope(encode_envelope(replace(PLAIN, metadata={"schema": "1.22.0"})))
    assert read.data == {"b": 2}
    assert read.metadata == {"schema": "1.24.0"}


def test_every_step_leads_to_the_present_version():
    for start in upcast.STEPS:
        seen = [start]
        while seen[-1] != EVENT_SCHEMA:
            seen.append(upcast.STEPS[seen[-1]][0])
            assert len(seen) <= len(upcast.STEPS) + 1
