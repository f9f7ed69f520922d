"""Who may do what to the topics of a prefix, and how many connections a node opens: data beside the catalogue.

Whoever writes the log topics could forge what the kernel stamps, so only nodes do (and the command line where it is
given a node's credentials). Clients of the estate write ``commands``, judged by the owner of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loom.topics.catalogue import Catalogue

ROLES: Final = {
    "node": "runs flows: reads and writes everything under the prefix",
    "client": "writes commands, reads states",
    "auditor": "reads the topics and writes nothing",
    "provisioner": "creates and alters the topics of the catalogue (`loom topics apply`)",
}


@dataclass(frozen=True, slots=True)
class Acl:
    """One permission, for any host.

    ``resource`` is ``topic``, ``group`` or ``transactionalId``, ``pattern`` is ``literal`` or ``prefix``.
    """

    role: str
    resource: str
    name: str
    pattern: str
    operations: tuple[str, ...]


def acls(catalogue: Catalogue) -> tuple[Acl, ...]:
    """Return the permissions of every role of a prefix."""
    prefix = catalogue.prefix
    return (
        Acl("node", "topic", prefix, "prefix", ("Describe", "DescribeConfigs", "Read", "Write")),
        Acl("node", "group", prefix, "prefix", ("Describe", "Read")),
        Acl("node", "transactionalId", f"{prefix}log.", "prefix", ("Describe", "Write")),
        Acl("node", "transactionalId", f"{prefix}fold.", "prefix", ("Describe", "Write")),
        Acl("client", "topic", catalogue.commands, "literal", ("Describe", "Write")),
        Acl("client", "topic", catalogue.states, "literal", ("Describe", "Read")),
        Acl("client", "group", f"{prefix}client.", "prefix", ("Describe", "Read")),
        Acl("auditor", "topic", prefix, "prefix", ("Describe", "DescribeConfigs", "Read")),
        Acl("auditor", "group", f"{prefix}audit.", "prefix", ("Describe", "Read")),
        Acl(
            "provisioner",
            "topic",
            prefix,
            "prefix",
            ("Alter", "AlterConfigs", "Create", "Describe", "DescribeConfigs"),
        ),
    )


@dataclass(frozen=True, slots=True)
class Clients:
    """Kafka clients of one kind in a node; each connects to every broker it meets, and once more to find them."""

    purpose: str
    count: int


def clients_of_node(owned: int, *, lanes: int = 1, folds: int = 0, agents: int = 2) -> tuple[Clients, ...]:
    """Return the clients of a node that writes ``owned`` partitions and folds ``folds``.

    ``lanes`` is the number of transactional producers of a writer, ``agents`` that of the processors' clients.
    """
    return (
        Clients("transactional producers of the partitions' writers", owned * lanes),
        Clients("readers of the partitions that are taken over (at start and after a rebalance)", owned),
        Clients("consumer of appends and commands, in the group that assigns partitions", 1),
        Clients("producer of requests, replies and signals", 1),
        Clients("reader of replies", 1),
        Clients("consumer of the fold", 1 if folds else 0),
        Clients("transactional producers of the fold", folds),
        Clients("clients of the processors' agents", agents),
    )


def connections_of_node(owned: int, brokers: int, *, lanes: int = 1, folds: int = 0, agents: int = 2) -> int:
    """Return the most connections that such a node opens: for each client one a broker, and one to find them."""
    clients = clients_of_node(owned, lanes=lanes, folds=folds, agents=agents)
    return sum(kind.count for kind in clients) * (brokers + 1)
