"""What provisioning asks of a Kafka cluster, each call bounded and with loom's own errors."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from loom.errors import BrokerError, ConfigError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from loom.topics.catalogue import Topic

T = TypeVar("T")

TIMEOUT_MS: Final = 5_000
_POLL_S: Final = 0.05
_UNREACHABLE: Final = frozenset(
    {
        KafkaError._TRANSPORT,  # noqa: SLF001 - the client names its own codes so
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError._SSL,  # noqa: SLF001
        KafkaError._AUTHENTICATION,  # noqa: SLF001
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
    }
)


_NOT_YET: Final = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
"""What a broker says of a topic that the controller made a moment ago."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it is. ``replicas`` is that of the partition with the fewest; ``settings`` are the effective values."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str]


class ExistsError(Exception):
    """A topic, or its partitions, had been made by someone else meanwhile."""


class _NotYetError(BrokerError):
    """A question that may be asked again."""


class Cluster:
    """The brokers at ``bootstrap``. ``kafka`` holds any further librdkafka properties (TLS, SASL)."""

    def __init__(
        self, bootstrap: str, kafka: Mapping[str, Any] | None = None, *, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        """Prepare; the brokers are asked at the first call.

        Raises:
            ConfigError: the client does not take a property.
        """
        self.bootstrap = bootstrap
        self._timeout_s = timeout_ms / 1000
        properties = {
            "client.id": "loom-topics",
            "log_level": 0,  # what the client would say is in the error that is raised
            **(kafka or {}),
            "bootstrap.servers": bootstrap,
        }
        try:
            self._admin = AdminClient(properties)
        except (KafkaException, TypeError, ValueError) as error:
            # The text may quote a value, say a password: only the name of a property is taken from it.
            named = re.search(r'property:? "([a-z.]+)"', str(error))
            setting = f"kafka.{named.group(1)}" if named else "kafka"
            raise ConfigError(
                setting, "the Kafka client does not take it", "see librdkafka's CONFIGURATION.md"
            ) from None

    def brokers(self) -> int:
        """Return how many brokers the cluster has now.

        Raises:
            UnreachableError: no answer.
        """
        return len(self._metadata().brokers)

    def partitions(self, names: Collection[str]) -> dict[str, int]:
        """Return how many partitions those of the topics have that exist; needs no more than the right to describe them.

        Raises:
            UnreachableError: no answer. BrokerError: another refusal.
        """
        known = self._ask(self._metadata).topics
        return {
            name: len(known[name].partitions) for name in names if name in known and not known[name].error
        }

    def describe(self, names: Collection[str]) -> dict[str, TopicState]:
        """Return those of the topics that exist.

        Raises:
            UnreachableError: no answer. BrokerError: another refusal, say for lack of a permission.
        """
        return self._ask(lambda: self._describe(names))

    def _describe(self, names: Collection[str]) -> dict[str, TopicState]:
        known = self._metadata().topics
        found = {name: known[name].partitions for name in names if name in known and not known[name].error}
        if not found:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in found]
        answers = self._admin.describe_configs(resources, request_timeout=self._timeout_s)
        states = {}
        for resource, future in answers.items():
            entries: dict[str, ConfigEntry] = self._result(
                future, f"read the settings of topic {resource.name}"
            )
            partitions = found[resource.name].values()
            states[resource.name] = TopicState(
                resource.name,
                len(partitions),
                min((len(p.replicas) for p in partitions), default=0),
                {entry.name: entry.value for entry in entries.values() if entry.value is not None},
            )
        return states

    def written(self, states: Collection[TopicState]) -> frozenset[str]:
        """Return the names of those topics that ever held a record.

        Raises:
            UnreachableError: no answer. BrokerError: another refusal.
        """
        return self._ask(lambda: self._written(states))

    def _written(self, states: Collection[TopicState]) -> frozenset[str]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(s.name, p): latest for s in states for p in range(s.partitions)}
        if not wanted:
            return frozenset()
        answers = self._admin.list_offsets(wanted, request_timeout=self._timeout_s)
        ends = {
            at: self._result(future, f"read the end of topic {at.topic}") for at, future in answers.items()
        }
        return frozenset(at.topic for at, end in ends.items() if end.offset > 0)

    def create(self, topic: Topic) -> None:
        """Create a topic.

        Raises:
            ExistsError: it is there. UnreachableError: no answer. BrokerError: another refusal.
        """
        new = NewTopic(
            topic.name,
            num_partitions=topic.partitions,
            replication_factor=topic.replicas,
            config=dict(topic.settings),
        )
        futures = self._admin.create_topics(
            [new], operation_timeout=self._timeout_s, request_timeout=self._timeout_s
        )
        self._result(futures[topic.name], f"create topic {topic.name}")

    def grow(self, name: str, partitions: int) -> None:
        """Give a topic more partitions.

        Raises:
            ExistsError: it has as many. UnreachableError: no answer. BrokerError: another refusal.
        """
        futures = self._admin.create_partitions(
            [NewPartitions(name, partitions)],
            operation_timeout=self._timeout_s,
            request_timeout=self._timeout_s,
        )
        self._result(futures[name], f"add partitions to topic {name}")

    def set(self, name: str, settings: Mapping[str, str]) -> None:
        """Set settings of a topic and leave its others alone.

        Raises:
            UnreachableError: no answer. BrokerError: another refusal.
        """
        changes = [
            ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
            for setting, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=changes)
        futures = self._admin.incremental_alter_configs([resource], request_timeout=self._timeout_s)
        for future in futures.values():
            self._result(future, f"change the settings of topic {name}")

    def wait_for(self, partitions: Mapping[str, int]) -> None:
        """Wait until the brokers tell clients of these topics with as many partitions, each with a leader.

        Raises:
            UnreachableError: they do not within the timeout.
        """

        def is_served() -> bool:
            topics = self._metadata().topics
            return all(_is_served(topics.get(name), count) for name, count in partitions.items())

        self.wait_until(is_served, "topics get no leader")

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Ask again until ``condition`` holds: what a controller has decided, a broker knows a moment later.

        Raises:
            UnreachableError: it does not hold within the timeout; ``otherwise`` says so.
        """
        until = time.monotonic() + self._timeout_s
        while not condition():
            if time.monotonic() >= until:
                raise UnreachableError("Kafka", self.bootstrap, "bootstrap", otherwise)
            time.sleep(_POLL_S)

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask again, within the timeout, while a broker has not yet heard of a topic or its leader."""
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return question()
            except _NotYetError as error:
                if time.monotonic() >= until:
                    raise BrokerError(error.doing, error.code) from None
            time.sleep(_POLL_S)

    def _metadata(self) -> Any:
        try:
            return self._admin.list_topics(timeout=self._timeout_s)
        except KafkaException as error:
            raise self._translate(error, "list topics") from None

    def _result(self, future: Future[T], doing: str) -> T:
        try:
            return future.result(self._timeout_s + 1)
        except TimeoutError:
            raise UnreachableError("Kafka", self.bootstrap, "bootstrap", "no answer in time") from None
        except KafkaException as error:
            raise self._translate(error, doing) from None

    def _translate(self, raised: KafkaException, doing: str) -> Exception:
        error = raised.args[0]
        if error.code() in {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_PARTITIONS}:
            return ExistsError(error.name())
        if error.code() in _UNREACHABLE:
            return UnreachableError("Kafka", self.bootstrap, "bootstrap", error.name())
        return (_NotYetError if error.code() in _NOT_YET else BrokerError)(doing, error.name())


def _is_served(topic: Any, partitions: int) -> bool:
    if topic is None or topic.error or len(topic.partitions) < partitions:
        return False
    return all(p.leader >= 0 for p in topic.partitions.values())
