"""Keys in memory: the twin of the other key stores, for tests and the simulation. They end with the process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loom.stores.keys.store import Charge, KeyRow, WrappedKey, WrappingKeyStore, charged
from loom.stores.keys.wrapping import KeyWrapper, random_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.ids import IdSource


@dataclass(slots=True)
class KeyTable:
    """What all handles of one key store in memory share."""

    rows: dict[str, KeyRow] = field(default_factory=dict)
    wrapper: KeyWrapper = field(default_factory=random_wrapper)
    name: str = field(default_factory=lambda: secrets.token_hex(8))


class _MemoryRows:
    waits = False

    def __init__(self, table: KeyTable) -> None:
        self._table = table

    async def load(self, subject: str) -> KeyRow | None:
        return self._table.rows.get(subject)

    async def charge(self, charges: Sequence[Charge]) -> list[KeyRow]:
        return [self._charged(*charge) for charge in charges]

    def _charged(self, subject: str, proposal: WrappedKey, limit: int) -> KeyRow:
        row = self._table.rows[subject] = charged(self._table.rows.get(subject), proposal, limit)
        return row

    async def destroy(self, subject: str) -> bool:
        row = self._table.rows.get(subject)
        if row is None or not row.keys:
            return False
        self._table.rows[subject] = KeyRow(destroyed=True)
        return True

    def identity(self) -> str:
        return f"memory:{self._table.name}"

    async def close(self) -> None:
        """Do nothing: the table outlives its handles."""


class MemoryKeyStore(WrappingKeyStore):
    """One node's handle on a :class:`KeyTable`. See :class:`loom.stores.keys.contract.KeyStore`."""

    def __init__(
        self, table: KeyTable | None = None, wrapper: KeyWrapper | None = None, *, ids: IdSource | None = None
    ) -> None:
        table = KeyTable() if table is None else table
        super().__init__(_MemoryRows(table), wrapper or table.wrapper, ids=ids)
