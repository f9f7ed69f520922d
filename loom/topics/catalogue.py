"""The topics of one prefix, as data (kafka.md "Topics")."""

from __future__ import annotations

from dataclasses import dataclass

from loom.ids import stream_kind


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Names of the topics under a prefix. Every topic has ``partitions`` partitions; the first eight are co-partitioned."""

    prefix: str = "loom."
    partitions: int = 8

    @property
    def executions(self) -> str:
        """Logs of executions."""
        return self.prefix + "executions"

    @property
    def inbox(self) -> str:
        """Inbox streams."""
        return self.prefix + "inbox"

    @property
    def quarantine(self) -> str:
        """Copies of held messages."""
        return self.prefix + "quarantine"

    @property
    def snapshots(self) -> str:
        """Folded states."""
        return self.prefix + "snapshots"

    @property
    def marks(self) -> str:
        """Stream marks, the partitions' own marks, and the schemas of the log."""
        return self.prefix + "marks"

    @property
    def appends(self) -> str:
        """Requests of nodes to a partition's writer."""
        return self.prefix + "appends"

    @property
    def commands(self) -> str:
        """Commands of foreign producers."""
        return self.prefix + "commands"

    @property
    def states(self) -> str:
        """Execution summaries, published by the fold processor."""
        return self.prefix + "states"

    @property
    def replies(self) -> str:
        """Answers to requests."""
        return self.prefix + "replies"

    @property
    def signals(self) -> str:
        """Operator signals."""
        return self.prefix + "signals"

    @property
    def dead(self) -> str:
        """What could not be used."""
        return self.prefix + "dead"

    def topic_of_stream(self, stream_id: str) -> str:
        """Return the topic in which a stream's events stand."""
        return self.prefix + stream_kind(stream_id)
