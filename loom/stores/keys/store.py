"""What every key store does alike: wrap, unwrap, refuse. Where the rows rest is a backend's business (``KeyRows``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from loom.entropy import Entropy
from loom.errors import InvalidInputError, KeyUnavailableError, LoomError, PayloadShreddedError
from loom.schemas.quick import quick
from loom.stores.gathered import Gathered
from loom.stores.keys.contract import MAX_KEY_USES, DataKey, KeySet
from loom.stores.keys.wrapping import KEY_BYTES, KeyWrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.ids import IdSource

MAX_SUBJECT: Final = 1024
"""Longest subject, in characters."""


_secret = Entropy(KEY_BYTES)
_id = Entropy(12)


Proposal = tuple[bytes, DataKey]
"""A key that nobody uses yet: how it may rest, and itself."""


@quick
@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One version of a key as it rests; ``uses`` counts the seals charged to it."""

    id: str
    wrapped: bytes
    uses: int = 0


@quick
@dataclass(frozen=True, slots=True)
class KeyRow:
    """What rests of a subject: its versions, oldest first; ``destroyed`` once they are gone for good."""

    keys: tuple[WrappedKey, ...] = ()
    destroyed: bool = False


Charge = tuple[str, WrappedKey, int]
"""A subject, the key that is proposed for it with the uses to be charged, and the limit of uses (see :func:`charged`)."""

ALWAYS_NEW: Final = -1
"""A limit that no key can bear: the proposal becomes current."""


class KeyRows(Protocol):
    """Where rows rest. Each call is atomic, and may be repeated after a lost answer: no key is lost by it."""

    waits: bool
    """Whether a call waits for a disk or a server, so that the charges of many tasks are worth one call."""

    async def load(self, subject: str) -> KeyRow | None:
        """The row, None where there never was one."""
        ...

    async def charge(self, charges: Sequence[Charge]) -> Sequence[KeyRow | LoomError | None]:
        """Apply :func:`charged` to each, one after the other; keep and return the rows, all durable once this returns.

        None may stand for a row of the proposal alone. An error stands for a row that is none; it concerns no other.
        """
        ...

    async def destroy(self, subject: str) -> bool:
        """Replace a row that has keys by a destroyed one, overwriting them; False where there are none."""
        ...

    def identity(self) -> str:
        """See ``KeyStore.identity``."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


def charged(row: KeyRow | None, proposal: WrappedKey, limit: int) -> KeyRow:
    """Charge the proposal's uses to the current key; where it cannot bear them, the proposal becomes current.

    A destroyed row stays what it is.
    """
    if row is None:
        return KeyRow((proposal,))
    if row.destroyed:
        return row
    if row.keys and row.keys[-1].uses + proposal.uses <= limit:
        last = row.keys[-1]
        return KeyRow((*row.keys[:-1], replace(last, uses=last.uses + proposal.uses)))
    return KeyRow((*row.keys, proposal))


class WrappingKeyStore:
    """See :class:`loom.stores.keys.contract.KeyStore`."""

    def __init__(self, rows: KeyRows, wrapper: KeyWrapper, *, ids: IdSource | None = None) -> None:
        self._rows = rows
        self._wrapper = wrapper
        self._ids: IdSource = ids or _opaque_id
        self._proposals: list[Proposal] = []
        self._charges = Gathered(self._charge) if rows.waits else None

    async def get(self, subject: str) -> KeySet | None:
        """See :meth:`loom.stores.keys.contract.KeyStore.get`."""
        row = await self._rows.load(_checked(subject))
        if row is None or not row.keys:
            return None
        keys = [key for wrapped in row.keys if (key := await self._unwrap(wrapped)) is not None]
        if not keys:
            raise KeyUnavailableError(subject)
        return KeySet(subject, tuple(keys))

    async def ensure(self, subject: str, uses: int = 1) -> KeySet:
        """See :meth:`loom.stores.keys.contract.KeyStore.ensure`."""
        if not 0 < uses <= MAX_KEY_USES:
            raise InvalidInputError(
                "uses of a key", f"{uses} is out of range", f"ask for 1 to {MAX_KEY_USES}"
            )
        return await self._charged(subject, uses, MAX_KEY_USES)

    async def rotate(self, subject: str) -> KeySet:
        """See :meth:`loom.stores.keys.contract.KeyStore.rotate`."""
        return await self._charged(subject, 0, ALWAYS_NEW)

    async def destroy(self, subject: str) -> bool:
        """See :meth:`loom.stores.keys.contract.KeyStore.destroy`."""
        return await self._rows.destroy(_checked(subject))

    async def was_destroyed(self, subject: str) -> bool:
        """See :meth:`loom.stores.keys.contract.KeyStore.was_destroyed`."""
        row = await self._rows.load(_checked(subject))
        return row is not None and row.destroyed

    def identity(self) -> str:
        """See :meth:`loom.stores.keys.contract.KeyStore.identity`."""
        return self._rows.identity()

    async def close(self) -> None:
        """See :meth:`loom.stores.keys.contract.KeyStore.close`."""
        await self._rows.close()

    async def _propose(self) -> Proposal:
        """Make a key; more than one, where the wrapper works in this process: the second costs a third of the first."""
        for _ in range(self._wrapper.ahead):
            key = DataKey(self._ids(), _secret())
            _ = key.aead  # made here too, beside the others
            self._proposals.append((await self._wrapper.wrap(key.secret), key))
        return self._proposals.pop()

    async def _charged(self, subject: str, uses: int, limit: int) -> KeySet:
        asked = (_checked(subject), uses, limit)
        if self._charges is not None:
            found = await self._charges.ask(asked)
        else:
            (found,) = await self._charge([asked])
        if isinstance(found, LoomError):
            raise found
        return found

    async def _charge(self, asked: Sequence[tuple[str, int, int]]) -> list[KeySet | LoomError]:
        """Charge what many tasks ask for (subject, uses, limit) in one call, and in one loop."""
        charges: list[Charge] = []
        made: list[DataKey] = []
        for subject, uses, limit in asked:
            wrapped, key = self._proposals.pop() if self._proposals else await self._propose()
            charges.append((subject, WrappedKey(key.id, wrapped, uses), limit))
            made.append(key)
        found: list[KeySet | LoomError] = []
        for (subject, proposal, _), key, row in zip(
            charges, made, await self._rows.charge(charges), strict=True
        ):
            if row is None:
                found.append(KeySet(subject, (key,)))
            elif isinstance(row, LoomError):
                found.append(row)
            else:
                found.append(await self._opened(subject, row, proposal, key))
        return found

    async def _opened(
        self, subject: str, row: KeyRow, proposal: WrappedKey, made: DataKey
    ) -> KeySet | LoomError:
        """Keys of a row; where the proposal became current, it need not be unwrapped."""
        if row.destroyed:
            return PayloadShreddedError(subject)
        try:
            last = row.keys[-1]
            known = last.id == proposal.id and last.wrapped == proposal.wrapped
            current = made if known else await self._unwrap(last)
            if current is None:
                return KeyUnavailableError(subject)
            older = [key for wrapped in row.keys[:-1] if (key := await self._unwrap(wrapped)) is not None]
        except LoomError as error:
            return error
        return KeySet(subject, (*older, current))

    async def _unwrap(self, wrapped: WrappedKey) -> DataKey | None:
        secret = await self._wrapper.unwrap(wrapped.wrapped)
        return None if secret is None or len(secret) != KEY_BYTES else DataKey(wrapped.id, secret)


def _opaque_id() -> str:
    return _id().hex()


def _checked(subject: str) -> str:
    if not subject or len(subject) > MAX_SUBJECT:
        raise InvalidInputError("subject", "it is empty or too long", f"use 1 to {MAX_SUBJECT} characters")
    if not subject.isascii():
        try:
            subject.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(
                "subject", "it holds half a surrogate pair", "pass valid Unicode"
            ) from None
    return subject
