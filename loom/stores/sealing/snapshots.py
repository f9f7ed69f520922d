"""The encrypting snapshot store: a folded state rests as one envelope, bound to its slot (system.md 3).

The context is ``loom-snap-v1|<execution_id>|<sequence>``; the envelope names its form (``aad: "loom-snap-v1"``), the context
itself is derived again from the row. So a state that was moved to another execution, or an older one rolled into a newer
slot, does not open. Field envelopes of events are bound to nothing but their subject's key (docs/sealing.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from loom.errors import (
    ConfigError,
    KeyUnavailableError,
    PayloadShreddedError,
    PlaintextSnapshotRefusedError,
    SnapshotUndecryptableError,
)
from loom.kernel.guard import is_sealed_envelope
from loom.stores.sealing.cipher import CIPHER, NotOpened, is_ours, open_value, seal_value
from loom.stores.sealing.keyring import KeyRing
from loom.stores.sealing.marker import SEAL
from loom.stores.sealing.nonces import NoncePlace, NonceSource, nonce_source
from loom.stores.sealing.paths import Node, change, tree_of
from loom.stores.sealing.subjects import Subjects
from loom.stores.sealing.tombstones import SHREDDED, Tombstones, folded

if TYPE_CHECKING:
    from loom.schemas.envelope import Json
    from loom.stores.contracts import EventStore, Snapshot, SnapshotStore
    from loom.stores.keys.contract import KeySet, KeyStore

BINDING: Final = "loom-snap-v1"
SUBJECT: Final = "subject"
_STATE: Final = "STATE"
"""What patterns of static paths start with, where those of events have a type."""


class EncryptingSnapshotStore:
    """Any snapshot store, with states sealed under their subjects' keys.

    ``seal_state`` (the default) seals the whole state. ``sensitive`` paths seal parts of it instead, for compatibility: they
    cannot name the answers of waits, so a kernel that checkpoints beside an encrypting event store refuses them.
    ``legacy_plaintext`` says what becomes of a state that is not sealed as a whole: ``load`` opens in it what opens
    (``legacy_sensitive`` restricts where it is tried) and leaves the rest as stored; ``refuse`` raises. ``events`` is a log at
    rest in which a tombstone may be looked for, and a subject that no snapshot names.

    Row metadata gains ``seal`` with cipher, subject and folded tombstones, and loses it again on loading.
    """

    def __init__(
        self,
        inner: SnapshotStore,
        keys: KeyStore,
        *,
        seal_state: bool | None = None,
        sensitive: Iterable[str] | None = None,
        legacy_plaintext: Literal["load", "refuse"] = "load",
        legacy_sensitive: Iterable[str] | None = None,
        events: EventStore | None = None,
        iv_source: NonceSource | None = None,
    ) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: both ``seal_state`` and ``sensitive``, or neither, are asked for; or ``iv_source`` is not one that
                tests may give.
        """
        self.seals_whole_state = sensitive is None if seal_state is None else seal_state
        if self.seals_whole_state == (sensitive is not None):
            raise ConfigError(
                "seal_state", "a state is sealed as a whole, or by paths", "give one of the two"
            )
        self._inner = inner
        self.keys = keys
        self._ring = KeyRing(keys)
        self._paths = None if sensitive is None else _tree(sensitive)
        self._refuse_plain = legacy_plaintext == "refuse"
        self._legacy = None if legacy_sensitive is None else _tree(legacy_sensitive)
        self._tombstones = None if events is None else Tombstones(events)
        self._subjects = None if events is None else Subjects(events)
        self._nonces = nonce_source(iv_source)

    async def save(self, snapshot: Snapshot) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.save`.

        Raises:
            PayloadShreddedError: the subject was erased. KeyUnavailableError: its current key cannot be had here.
            InvalidInputError: the state is no JSON.
        """
        subject = await self._subject_of(snapshot)
        record: dict[str, Json] = {"cipher": CIPHER, SUBJECT: subject}
        shredded = _shredded(snapshot.state)
        if shredded:
            record[SHREDDED] = shredded
        if self.seals_whole_state:
            key = await self._ring.sealing(subject, 1)
            nonce = self._nonces(_place(snapshot, "state"))
            state: dict[str, Json] = seal_value(key, snapshot.state, nonce, aad=_context(snapshot))
        else:
            state = await self._seal_paths(snapshot, subject)
        await self._inner.save(replace(snapshot, state=state, metadata={**snapshot.metadata, SEAL: record}))

    async def load_latest(self, execution_id: str) -> Snapshot | None:
        """See :meth:`loom.stores.contracts.SnapshotStore.load_latest`.

        Raises:
            PayloadShreddedError: the key is not here, and a tombstone proves that the subject was erased.
            KeyUnavailableError: the key is not here, without that proof.
            SnapshotUndecryptableError: the row does not belong where it stands, or lacks its binding.
            PlaintextSnapshotRefusedError: it is not sealed as a whole, and such ones are refused.
        """
        stored = await self._inner.load_latest(execution_id)
        if stored is None:
            return None
        if is_sealed_envelope(stored.state):
            state = await self._open_state(stored)
        elif self._refuse_plain:
            raise PlaintextSnapshotRefusedError(execution_id)
        else:
            state = await self._open_parts(stored)
        metadata = {key: value for key, value in stored.metadata.items() if key != SEAL}
        return replace(stored, state=state, metadata=metadata)

    async def delete(self, execution_id: str) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.delete`."""
        await self._inner.delete(execution_id)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.close`."""
        await self._inner.close()

    async def load_at_rest(self, execution_id: str) -> Snapshot | None:
        """The row as it is stored; no key is asked for."""
        return await self._inner.load_latest(execution_id)

    def forget_keys(self, subject: str) -> None:
        """Use no key of the subject from memory any more: it was just destroyed."""
        self._ring.drop(subject)

    # -- parts ---------------------------------------------------------------------------------------------------

    async def _open_state(self, stored: Snapshot) -> dict[str, Json]:
        if stored.state.get("aad") != BINDING:
            raise SnapshotUndecryptableError(stored.execution_id, stored.sequence)
        subject = await self._subject_of(stored)
        keys = await self._ring.opening(subject)
        try:
            state = open_value(keys, stored.state, aad=_context(stored))
        except NotOpened as closed:
            if closed.had_key:
                raise SnapshotUndecryptableError(stored.execution_id, stored.sequence) from None
            raise await self._refusal(stored, subject) from None
        if not isinstance(state, dict):
            raise SnapshotUndecryptableError(stored.execution_id, stored.sequence)
        return state

    async def _open_parts(self, stored: Snapshot) -> dict[str, Json]:
        """A state that is not sealed as a whole: of static paths, or of the time before."""
        subject = await self._subject_of(stored)
        keys = await self._ring.opening(subject)
        if self._paths is None:
            return _open_what_opens(stored.state, self._legacy, keys)
        try:
            return change(
                stored.state, self._paths, lambda v, _p, _at: open_value(keys, v) if is_ours(v) else v
            )
        except NotOpened:
            raise await self._refusal(stored, subject) from None

    async def _seal_paths(self, snapshot: Snapshot, subject: str) -> dict[str, Json]:
        assert self._paths is not None
        places: list[str] = []

        def count(value: Json, _pattern: str, path: str) -> Json:
            places.append(path)
            return value

        change(snapshot.state, self._paths, count)
        if not places:
            return snapshot.state
        key = await self._ring.sealing(subject, len(places))

        def seal(value: Json, _pattern: str, path: str) -> Json:
            return value if value is None else seal_value(key, value, self._nonces(_place(snapshot, path)))

        return change(snapshot.state, self._paths, seal)

    async def _refusal(self, stored: Snapshot, subject: str) -> PayloadShreddedError | KeyUnavailableError:
        proven = folded(stored, subject)
        if not proven and self._tombstones is not None:
            proven = await self._tombstones.stands(stored.execution_id, subject)
        if proven:
            return PayloadShreddedError(subject)
        return KeyUnavailableError(subject, stored.execution_id, stored.sequence)

    async def _subject_of(self, snapshot: Snapshot) -> str:
        """The subject as the row, the state or the log names it; else the execution's own id."""
        record = snapshot.metadata.get(SEAL)
        sources = [record if isinstance(record, Mapping) else {}]
        if not is_sealed_envelope(snapshot.state):
            sources.append(snapshot.state)
        for source in sources:
            for name in (SUBJECT, "chainId"):
                if isinstance(source.get(name), str) and source[name]:
                    return str(source[name])
        return (
            snapshot.execution_id
            if self._subjects is None
            else await self._subjects.of(snapshot.execution_id)
        )


def _context(snapshot: Snapshot) -> tuple[str, str]:
    return BINDING, f"{BINDING}|{snapshot.execution_id}|{snapshot.sequence}"


def _place(snapshot: Snapshot, path: str) -> NoncePlace:
    return f"snapshot:{snapshot.execution_id}", snapshot.sequence, "", path


def _tree(paths: Iterable[str]) -> Node:
    return tree_of(tuple(sorted(f"{_STATE}.{path}" for path in paths)))


def _shredded(state: Mapping[str, Json]) -> list[Json]:
    """Subjects whose tombstones are folded into a state."""
    variables = state.get("variables")
    names = variables.get("_shredded") if isinstance(variables, Mapping) else None
    return sorted(names) if isinstance(names, Mapping) else []


def _open_what_opens(state: dict[str, Json], paths: Node | None, keys: KeySet | None) -> dict[str, Json]:
    """Open in a state what opens, at these paths or anywhere; what does not is left exactly as stored."""

    def attempt(value: Json, _pattern: str = "", _path: str = "") -> Json:
        try:
            return open_value(keys, value) if is_ours(value) else value
        except NotOpened:
            return value

    def everywhere(value: Json) -> Json:
        opened = attempt(value)
        if opened is not value:
            return opened
        if isinstance(value, Mapping):
            return {name: everywhere(part) for name, part in value.items()}
        return [everywhere(part) for part in value] if isinstance(value, list | tuple) else value

    result: dict[str, Json] = everywhere(state) if paths is None else change(state, paths, attempt)
    return result
