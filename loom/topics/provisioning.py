"""Bring a cluster to its catalogue (kafka.md "Topics").

``plan`` says what differs, ``apply`` does exactly that, ``check`` refuses to run on less.
How many partitions there are decides where everything is, so it is never changed under records: growing is a migration
to a new prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.errors import TopicsError
from loom.schemas.registry import COMPATIBILITY
from loom.schemas.table import packaged
from loom.topics.cluster import ExistsError
from loom.topics.plan import (
    AddPartitions,
    Change,
    ChangeSetting,
    CreateTopic,
    OnTopic,
    Plan,
    Refusal,
    RegisterSchema,
    Remark,
    SetCompatibility,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from loom.schemas.registry import SchemaRegistry
    from loom.topics.catalogue import Catalogue, Topic
    from loom.topics.cluster import Cluster, TopicState

VITAL: Final = ("cleanup.policy", "message.timestamp.type")
"""Settings without which the log is wrong, not merely slow: no role starts on another value of these."""

MIGRATE: Final = (
    "set partitions to what the log was made with, or migrate: choose a new topic_prefix, run `loom topics apply` with "
    "the new number, and start new executions there while the old ones finish"
)
_APPLY: Final = "run `loom topics apply`"


def plan(cluster: Cluster, catalogue: Catalogue, registry: SchemaRegistry | None = None) -> Plan:
    """Return every difference between the cluster and the catalogue, sized for its brokers; change nothing.

    With a registry the schemas of this release belong to it, one subject for each topic and record.

    Raises:
        UnreachableError: brokers or registry do not answer. BrokerError, RegistryError: they refuse to tell.
    """
    states = cluster.describe([topic.name for topic in catalogue.topics()])
    # A broker that is down for a moment is no reason to ask for fewer replicas than there are.
    sized = catalogue.sized_for(max([cluster.brokers(), *(state.replicas for state in states.values())]))
    topics = sized.topics()
    mismatch = any(state.partitions != sized.partitions for state in states.values())
    may_grow = mismatch and not cluster.written(states.values())
    changes: list[Change] = []
    refusals: list[Refusal] = []
    remarks: list[Remark] = []
    for topic in topics:
        state = states.get(topic.name)
        if state is None:
            changes.append(CreateTopic(topic))
            continue
        match _partitions(topic, state, may_grow=may_grow):
            case AddPartitions() as growth:
                changes.append(growth)
            case Refusal() as refusal:
                refusals.append(refusal)
        changes.extend(_settings(topic, state))
        if state.replicas < topic.replicas:
            remarks.append(
                Remark(
                    topic.name, f"has {state.replicas} of {topic.replicas} replicas: reassign its partitions"
                )
            )
    if registry is not None:
        changes.extend(_schemas(sized, registry))
    return Plan(catalogue.prefix, tuple(changes), tuple(refusals), tuple(remarks))


def apply(
    cluster: Cluster,
    wanted: Plan,
    registry: SchemaRegistry | None = None,
    done: Callable[[Change], None] = lambda _: None,
) -> None:
    """Make the changes of a plan, in its order, and no other; ``done`` is told of each.

    Applying a plan again changes nothing more: what someone else made meanwhile is accepted where it is what the plan
    would have made.

    Raises:
        TopicsError: the plan holds a refusal (nothing was changed), or a topic appeared meanwhile in another shape.
        UnreachableError: no answer; run it again. BrokerError, SchemaRefusedError, RegistryError: refused.
    """
    if wanted.refusals:
        raise refused(wanted)
    for change in wanted.changes:
        _make(cluster, change, registry)
        done(change)
    if not any(isinstance(change, OnTopic) for change in wanted.changes):
        return
    cluster.wait_until(lambda: _has_arrived(cluster, wanted), "what was applied is not seen yet")
    cluster.wait_for({c.topic.name: c.topic.partitions for c in wanted.changes if isinstance(c, CreateTopic)})


def _has_arrived(cluster: Cluster, wanted: Plan) -> bool:
    """Whether a client that asks now is told of every change."""
    names = {
        c.topic.name if isinstance(c, CreateTopic) else c.name
        for c in wanted.changes
        if isinstance(c, OnTopic)
    }
    states = cluster.describe(names)
    return names == states.keys() and all(_is_made(change, states) for change in wanted.changes)


def _is_made(change: Change, states: dict[str, TopicState]) -> bool:
    match change:
        case CreateTopic(topic):
            return states[topic.name].partitions == topic.partitions
        case AddPartitions(name, _, want):
            return states[name].partitions == want
        case ChangeSetting(name, setting, _, want):
            return states[name].settings.get(setting) == want
        case _:
            return True


def check(cluster: Cluster, catalogue: Catalogue) -> tuple[str, ...]:
    """Make sure that a role can run on these topics; return the differences that it can live with.

    Raises:
        TopicsError: topics are missing, or have another number of partitions, or a vital setting differs; each is named.
        UnreachableError: the brokers do not answer. BrokerError: they refuse to tell.
    """
    found = plan(cluster, catalogue)
    missing = [c.topic.name for c in found.changes if isinstance(c, CreateTopic)]
    if len(missing) == len(catalogue.topics()):
        raise TopicsError(
            (f"there are no topics with the prefix {catalogue.prefix!r} at {cluster.bootstrap}",),
            f"correct topic_prefix, or {_APPLY}",
        )
    if found.refusals:
        raise refused(found)
    vital = [c for c in found.changes if not isinstance(c, ChangeSetting) or c.setting in VITAL]
    if vital:
        raise TopicsError(_grouped(_lack(change) for change in vital), _APPLY)
    return tuple(str(change) for change in found.changes) + tuple(str(remark) for remark in found.remarks)


def refused(found: Plan) -> TopicsError:
    """Return the error for the refusals of a plan, each topic named."""
    return TopicsError(_grouped((r.topic, r.problem) for r in found.refusals), found.refusals[0].remedy)


def _grouped(lacks: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """One sentence for all topics with the same problem, in the order of the catalogue."""
    topics: dict[str, list[str]] = {}
    for topic, problem in lacks:
        topics.setdefault(problem, []).append(topic)
    return tuple(f"{', '.join(names)}: {problem}" for problem, names in topics.items())


def _lack(change: Change) -> tuple[str, str]:
    match change:
        case CreateTopic(topic):
            return topic.name, "missing"
        case AddPartitions(name, have, want):
            return name, f"{have} partitions, not {want}"
        case ChangeSetting(name, setting, have, want):
            return name, f"{setting} is {have}, not {want}"
        case SetCompatibility(subject) | RegisterSchema(subject):
            return subject, str(change)


def _partitions(topic: Topic, state: TopicState, *, may_grow: bool) -> AddPartitions | Refusal | None:
    if state.partitions == topic.partitions:
        return None
    if state.partitions < topic.partitions and may_grow:
        return AddPartitions(topic.name, state.partitions, topic.partitions)
    return Refusal(topic.name, f"{state.partitions} partitions, not {topic.partitions}", MIGRATE)


def _settings(topic: Topic, state: TopicState) -> Iterator[ChangeSetting]:
    for setting, want in topic.settings.items():
        have = state.settings.get(setting)
        if setting == "min.insync.replicas" and state.replicas < topic.replicas:
            continue  # more than there are replicas would stop every write
        if have is not None and have != want:
            yield ChangeSetting(topic.name, setting, have, want)


def _schemas(catalogue: Catalogue, registry: SchemaRegistry) -> Iterator[Change]:
    for subject, record in catalogue.subjects().items():
        level = registry.compatibility(subject)
        if level != COMPATIBILITY:
            yield SetCompatibility(subject, level, COMPATIBILITY)
        if registry.find(subject, packaged()[record].text) is None:
            yield RegisterSchema(subject, record)


def _make(cluster: Cluster, change: Change, registry: SchemaRegistry | None) -> None:
    match change:
        case CreateTopic(topic):
            try:
                cluster.create(topic)
            except ExistsError:
                _accept(cluster, topic)
        case AddPartitions(name, _, want):
            try:
                cluster.grow(name, want)
            except ExistsError:
                cluster.wait_for({name: 1})
                state = cluster.describe([name]).get(name)
                if state is None or state.partitions != want:
                    raise _meanwhile(name) from None
        case ChangeSetting(name, setting, _, want):
            cluster.set(name, {setting: want})
        case SetCompatibility(subject, _, want) if registry is not None:
            registry.set_compatibility(subject, want)
        case RegisterSchema(subject, record) if registry is not None:
            registry.register(subject, packaged()[record].text)
        case _:
            raise ValueError("a plan with schemas is applied with its registry")


def _accept(cluster: Cluster, topic: Topic) -> None:
    cluster.wait_for({topic.name: 1})
    state = cluster.describe([topic.name]).get(topic.name)
    if state is None or state.partitions != topic.partitions or any(_settings(topic, state)):
        raise _meanwhile(topic.name)


def _meanwhile(name: str) -> TopicsError:
    return TopicsError(
        (f"topic {name} was changed by someone else meanwhile",), "run `loom topics plan` again"
    )


def registered_ids(catalogue: Catalogue, registry: SchemaRegistry) -> dict[str, int]:
    """Return the registry ids of this release's schemas by record name: what a codec writes in the Confluent format.

    Empty unless every subject is registered, so that a half-finished ``apply`` changes nothing in what is written.

    Raises:
        UnreachableError, RegistryError: the registry does not answer, or not as it should.
    """
    ids: dict[str, int] = {}
    for subject, record in catalogue.subjects().items():
        found = registry.find(subject, packaged()[record].text)
        if found is None:
            return {}
        ids.setdefault(record, found)
    return ids
