"""A node's stores, sealed as its settings say (system.md 3.2 and 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loom.errors import ConfigError
from loom.stores.keys.contract import KeyStore
from loom.stores.keys.factory import open_keys
from loom.stores.sealing.checkpoints import check_checkpoints, seals
from loom.stores.sealing.doctor import SealingDoctor
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.shred import SubjectRecords
from loom.stores.sealing.snapshots import EncryptingSnapshotStore

if TYPE_CHECKING:
    from loom.config import Config
    from loom.stores.contracts import EventStore, SnapshotStore


@dataclass(frozen=True, slots=True)
class SealedStores:
    """Stores to use, what erasure works on, and who looks at them; ``opened`` is a key store to be closed after them."""

    events: EventStore
    snapshots: SnapshotStore | None
    subjects: SubjectRecords
    doctor: SealingDoctor
    opened: KeyStore | None = None


def seal_stores(
    config: Config,
    events: EventStore,
    snapshots: SnapshotStore | None,
    keys: object | None = None,
    *,
    snapshots_given: bool,
) -> SealedStores:
    """Wrap stores where there are keys: those given, else those that ``sealing.keys`` names.

    A store that seals already stays as it is. Snapshots of the node's own making are sealed on the same keys; those that
    a caller gave are taken as they are, or refused.

    Raises:
        PlaintextCheckpointError: a checkpoint would rest in plaintext, and ``sealing.allow_plaintext_checkpoints`` is off.
        ConfigError: keys, or paths, that cannot be used. ShardSealingMismatchError: shards disagree.
    """
    opened = None
    if keys is None and not seals(events):
        keys = opened = open_keys(config)
    if keys is not None and not isinstance(keys, KeyStore):
        raise ConfigError("keys", "it is no key store", "give one of loom.stores.keys")
    at_rest = events
    if isinstance(keys, KeyStore) and not seals(events):
        events = EncryptingEventStore.over(events, keys, config.sealing.sensitive, snapshots=snapshots)
    shared = getattr(events, "keys", None)
    if snapshots is not None and not snapshots_given and seals(events) and isinstance(shared, KeyStore):
        legacy = config.sealing.legacy_plaintext
        snapshots = EncryptingSnapshotStore(snapshots, shared, legacy_plaintext=legacy, events=at_rest)
    check_checkpoints(events, snapshots, allow_plaintext=config.sealing.allow_plaintext_checkpoints)
    subjects = SubjectRecords(events, shared if isinstance(shared, KeyStore) else None, snapshots)
    doctor = SealingDoctor(events, snapshots, allow_plaintext=config.sealing.allow_plaintext_checkpoints)
    return SealedStores(events, snapshots, subjects, doctor, opened)
