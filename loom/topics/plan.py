"""Differences between a catalogue and a cluster: what ``plan`` shows and ``apply`` does, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loom.topics.catalogue import Topic


@dataclass(frozen=True, slots=True)
class CreateTopic:
    """A topic is missing."""

    topic: Topic

    def __str__(self) -> str:
        replicas = "1 replica" if self.topic.replicas == 1 else f"{self.topic.replicas} replicas"
        settings = ", ".join(f"{name}={value}" for name, value in self.topic.settings.items())
        return (
            f"create topic {self.topic.name} with {self.topic.partitions} partitions, {replicas}, {settings}"
        )


@dataclass(frozen=True, slots=True)
class AddPartitions:
    """A topic that never held a record has fewer partitions than it should."""

    name: str
    have: int
    want: int

    def __str__(self) -> str:
        return f"give topic {self.name} {self.want} partitions (it has {self.have}, and no record yet)"


@dataclass(frozen=True, slots=True)
class ChangeSetting:
    """A topic has another value of a setting."""

    name: str
    setting: str
    have: str
    want: str

    def __str__(self) -> str:
        return f"set {self.setting} of topic {self.name} to {self.want} (it is {self.have})"


@dataclass(frozen=True, slots=True)
class SetCompatibility:
    """A subject of the registry has another compatibility level; ``have`` is None for the registry's default."""

    subject: str
    have: str | None
    want: str

    def __str__(self) -> str:
        have = "the registry's default" if self.have is None else self.have
        return f"set the compatibility of subject {self.subject} to {self.want} (it is {have})"


@dataclass(frozen=True, slots=True)
class RegisterSchema:
    """A schema of this release is not registered for a subject."""

    subject: str
    record: str

    def __str__(self) -> str:
        return f"register {self.record} for subject {self.subject}"


OnTopic = CreateTopic | AddPartitions | ChangeSetting
Change = OnTopic | SetCompatibility | RegisterSchema


@dataclass(frozen=True, slots=True)
class Refusal:
    """A difference that no change can mend; nothing is applied while it stands."""

    topic: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something an operator should know and that loom neither changes nor minds."""

    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.text}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Every difference, in the order in which ``apply`` goes through them."""

    prefix: str
    changes: tuple[Change, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    remarks: tuple[Remark, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether cluster and catalogue agree."""
        return not self.changes and not self.refusals

    def to_json(self) -> dict[str, Any]:
        """Return the plan for machines."""
        return {
            "prefix": self.prefix,
            "changes": [_change_json(change) for change in self.changes],
            "refusals": [{"topic": r.topic, "problem": r.problem, "remedy": r.remedy} for r in self.refusals],
            "remarks": [{"topic": r.topic, "text": r.text} for r in self.remarks],
        }


def _change_json(change: Change) -> dict[str, Any]:
    match change:
        case CreateTopic(topic):
            return {
                "change": "create-topic",
                "topic": topic.name,
                "partitions": topic.partitions,
                "replicas": topic.replicas,
                "settings": dict(topic.settings),
            }
        case AddPartitions(name, have, want):
            return {"change": "add-partitions", "topic": name, "have": have, "want": want}
        case ChangeSetting(name, setting, have, want):
            return {"change": "change-setting", "topic": name, "setting": setting, "have": have, "want": want}
        case SetCompatibility(subject, level, want):
            return {"change": "set-compatibility", "subject": subject, "have": level, "want": want}
        case RegisterSchema(subject, record):
            return {"change": "register-schema", "subject": subject, "record": record}
