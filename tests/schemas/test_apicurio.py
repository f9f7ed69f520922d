"""The registry client and the catalogue's subjects against a real Confluent-compatible registry, Apicurio.

Long for its download (142 MB, once, into the user's cache folder) and its start; run by ``make soak``.
"""

import json
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request

import pytest
from golden import current_cases

from loom.errors import (
    LoomError,
    SchemaRefusedError,
    SchemaUnreadableError,
    ServiceMissingError,
    UnreachableError,
)
from loom.schemas.codec import Codec
from loom.schemas.registry import SchemaRegistry
from loom.schemas.table import SchemaTable, packaged
from loom.testing.services.java import cache_folder, find_java
from loom.testing.services.ports import free_port
from loom.testing.services.process import OwnedProcess
from loom.topics import provisioning
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster

pytestmark = pytest.mark.soak
VERSION = "2.6.13.Final"
START_S = 60


def archive():
    found = cache_folder() / "apicurio" / f"apicurio-registry-app-{VERSION}-all.tar.gz"
    if not found.exists():
        maven = shutil.which("mvn")
        if maven is None:
            pytest.skip("Maven is needed to get Apicurio Registry, and is not on PATH")
        artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
        command = [
            maven,
            "-q",
            "dependency:copy",
            f"-Dartifact={artifact}",
            f"-DoutputDirectory={found.parent}",
        ]
        got = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if got.returncode != 0:
            pytest.skip(f"Maven could not get Apicurio Registry: {got.stdout.splitlines()[-1:]}")
    return found


@pytest.fixture(scope="module")
def registry_process(tmp_path_factory):
    try:
        java = find_java()
    except ServiceMissingError as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("apicurio")
    with tarfile.open(archive()) as tar:
        tar.extractall(folder, filter="data")
    port = free_port()
    process = OwnedProcess("apicurio", folder)
    jar = next(folder.glob("**/apicurio-registry-app-*-runner.jar"))
    process.spawn(
        [java, "-Xmx256m", "-XX:TieredStopAtLevel=1", f"-Dquarkus.http.port={port}", "-jar", str(jar)]
    )
    process.url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    try:
        wait_for(process)
        yield process
    finally:
        process.stop()


def wait_for(process):
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{process.url}/subjects", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            assert process.running, "it ended by itself"
            time.sleep(0.1)
    pytest.fail(f"Apicurio was not up after {START_S} s")


@pytest.fixture
def registered(registry_process, kafka_bootstrap, topic_prefix):
    registry = SchemaRegistry(registry_process.url)
    cluster, catalogue = Cluster(kafka_bootstrap), Catalogue(topic_prefix, 1)
    wanted = provisioning.plan(cluster, catalogue, registry)
    assert len(wanted.changes) == 11 + 2 * len(catalogue.subjects())
    provisioning.apply(cluster, wanted, registry)
    assert provisioning.plan(cluster, catalogue, registry).is_empty
    return registry, provisioning.registered_ids(catalogue, registry), catalogue


def test_the_log_in_the_wire_format_of_a_real_registry(registered, registry_process):
    registry, ids, _ = registered
    assert set(ids) == set(packaged())
    codec = Codec(registered=ids)
    stranger = Codec(SchemaTable(registry.schema_text))
    for _, envelope in current_cases():
        value = codec.encode_envelope(envelope)
        assert value[0] == 0
        assert stranger.decode_envelope(value) == envelope


def test_the_registrys_own_deserializer_reads_the_log(registered, registry_process):
    _, ids, catalogue = registered
    codec = Codec(registered=ids)
    avro = pytest.importorskip(
        "confluent_kafka.schema_registry.avro", reason="the client's Avro extra is not installed"
    )
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.serialization import MessageField, SerializationContext

    stock = avro.AvroDeserializer(SchemaRegistryClient({"url": registry_process.url}))
    context = SerializationContext(catalogue.executions, MessageField.VALUE)
    for _, envelope in current_cases():
        read = stock(codec.encode_envelope(envelope), context)
        assert (read["id"], read["streamId"], read["sequence"]) == (
            envelope.id,
            envelope.stream_id,
            envelope.sequence,
        )
        assert json.loads(read["data"]) == envelope.data


def test_an_incompatible_schema_is_refused_by_the_registry(registered):
    registry, _, catalogue = registered
    subject = f"{catalogue.commands}-loom.Command"
    other = json.dumps(
        {
            "type": "record",
            "name": "Command",
            "namespace": "loom",
            "fields": [{"name": "must", "type": "string"}],
        }
    )
    with pytest.raises(SchemaRefusedError, match=subject):
        registry.register(subject, other)
    assert registry.compatibility(subject) == "FULL_TRANSITIVE"


def test_an_older_schema_and_the_present_one_go_together(registered):
    registry, _, catalogue = registered
    from golden import SCHEMAS

    subject = f"{catalogue.executions}-loom.Envelope"
    old = (SCHEMAS / "history" / "envelope-1.24.0.avsc").read_text(encoding="utf-8")
    assert registry.register(subject, old) != registry.find(subject, packaged()["loom.Envelope"].text)


def test_an_unknown_id_is_a_typed_error(registered):
    with pytest.raises(SchemaUnreadableError):
        registered[0].schema_text(2_000_000_000)


def test_reading_goes_on_when_the_registry_is_gone(registered, registry_process):
    registry, ids, _ = registered
    writer = Codec(registered=ids)
    reader = Codec(SchemaTable(registry.schema_text))
    registry_process.stop()
    _, envelope = next(current_cases())
    value = writer.encode_envelope(envelope)
    with pytest.raises(UnreachableError) as refused:
        reader.decode_envelope(value)
    assert isinstance(refused.value, LoomError)
    for note in writer.notes():
        reader.learn(note)
    assert reader.decode_envelope(value) == envelope
