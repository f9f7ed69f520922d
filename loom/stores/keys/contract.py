"""The contract of key stores: the keys of subjects, each wrapped at rest, and the proof that one was destroyed.

A *subject* is whose data a key seals; destroying its keys erases it (system.md 0, "Erasure").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from loom.schemas.quick import quick

MAX_KEY_USES: Final = 2**28
"""Seals that one key is charged with before it is rotated: long before the 2^32 random nonces that AES-GCM bears."""


@quick
@dataclass(frozen=True, slots=True)
class DataKey:
    """One version of a subject's key: an opaque id, which stands beside what it sealed, and 32 bytes that never print."""

    id: str
    secret: bytes = field(repr=False)
    _aead: AESGCM | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def aead(self) -> AESGCM:
        """The cipher under this key: made once, for that costs more than what it seals, and gone with the key."""
        made = self._aead
        if made is None:
            made = AESGCM(self.secret)
            object.__setattr__(self, "_aead", made)
        return made


@quick
@dataclass(frozen=True, slots=True)
class KeySet:
    """All versions of a subject's key, oldest first. The last one seals, each opens what it sealed."""

    subject: str
    keys: tuple[DataKey, ...]

    @property
    def current(self) -> DataKey:
        """The key that seals."""
        return self.keys[-1]

    def find(self, key_id: str) -> DataKey | None:
        """The version of that id, None where it is not among these."""
        return next((key for key in self.keys if key.id == key_id), None)


@runtime_checkable
class KeyStore(Protocol):
    """Keys by subject. Every call is bounded and raises ``UnreachableError`` or ``StoreRefusedError`` of its backend."""

    async def get(self, subject: str) -> KeySet | None:
        """Keys to open with; None where there are none: never made here, or destroyed.

        Raises:
            KeyUnavailableError: there are keys, and this node cannot unwrap any.
        """
        ...

    async def ensure(self, subject: str, uses: int = 1) -> KeySet:
        """Keys to seal with, made on first use; ``uses`` more seals are charged to the current one.

        The current key is rotated first where they would exceed ``MAX_KEY_USES``. Charges of all nodes add up, so no
        key seals more than that, whatever crashes.

        Raises:
            PayloadShreddedError: they were destroyed; nothing is sealed for an erased subject any more.
            KeyUnavailableError: there are keys, and this node cannot unwrap the current one. Nothing is made in its place.
        """
        ...

    async def rotate(self, subject: str) -> KeySet:
        """Make a new current key (the first, where there is none); the older ones go on opening.

        Raises:
            as ``ensure``.
        """
        ...

    async def destroy(self, subject: str) -> bool:
        """Destroy every key of the subject for good; False where there was none (nothing is remembered of that)."""
        ...

    async def was_destroyed(self, subject: str) -> bool:
        """Whether this very store destroyed the subject's keys: proof. False for keys that were never here."""
        ...

    def identity(self) -> str:
        """Name of the backing keys: equal where two stores share them (clauses.md, point 15). Holds no secret."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


def shares_keys(one: object, other: object) -> bool:
    """Whether two things are key stores on the same backing keys."""
    return isinstance(one, KeyStore) and isinstance(other, KeyStore) and one.identity() == other.identity()
