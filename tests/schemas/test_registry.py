"""The registry client against an HTTP server that answers as a Confluent-compatible registry does, and as none does."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from loom.errors import (
    ConfigError,
    RegistryError,
    SchemaRefusedError,
    SchemaUnreadableError,
    UnreachableError,
)
from loom.schemas.registry import MAX_ANSWER_BYTES, SchemaRegistry
from loom.schemas.table import packaged
from loom.topics import provisioning
from loom.topics.catalogue import Catalogue
from loom.topics.plan import Plan, RegisterSchema, SetCompatibility


class FakeRegistry:
    """Subjects, ids, levels; ``answer`` overrides everything."""

    def __init__(self):
        self.ids, self.subjects, self.levels, self.seen, self.answer = {}, {}, {}, [], None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def _serve(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.seen.append((self.command, self.path, self.headers.get("Authorization")))
                status, answer = outer.answer or outer.reply(self.command, self.path, body)
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_PUT = _serve  # noqa: N815 - the names that the server looks for

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, method, path, body):
        parts = [unquote(p) for p in path.strip("/").split("/")]
        match method, parts:
            case "GET", ["schemas", "ids", number]:
                text = next((t for t, i in self.ids.items() if i == int(number)), None)
                return (200, {"schema": text}) if text else (404, {"error_code": 40403})
            case "POST", ["subjects", subject]:
                known = body["schema"] in self.subjects.get(subject, [])
                return (200, {"id": self.ids[body["schema"]], "subject": subject}) if known else (404, {})
            case "POST", ["subjects", subject, "versions"]:
                if "incompatible" in subject:
                    return 409, {"error_code": 409}
                self.subjects.setdefault(subject, []).append(body["schema"])
                return 200, {"id": self.ids.setdefault(body["schema"], len(self.ids) + 1)}
            case "GET", ["config", subject]:
                return (
                    (200, {"compatibilityLevel": self.levels[subject]})
                    if subject in self.levels
                    else (404, {})
                )
            case "PUT", ["config", subject]:
                self.levels[subject] = body["compatibility"]
                return 200, body
        return 400, {}


@pytest.fixture
def fake():
    registry = FakeRegistry()
    thread = threading.Thread(target=registry.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield registry
    registry.server.shutdown()
    registry.server.server_close()
    thread.join(5)


@pytest.fixture
def client(fake):
    return SchemaRegistry(fake.url, timeout_s=2)


class NoCluster:
    """A cluster whose topics are as they should be: only the registry's part of a plan is looked at."""

    def __init__(self, catalogue):
        self.catalogue = catalogue

    def brokers(self):
        return 1

    def describe(self, names):
        from loom.topics.cluster import TopicState

        return {t.name: TopicState(t.name, t.partitions, 1, t.settings) for t in self.catalogue.topics()}


def test_schemas_are_planned_registered_and_then_found(fake, client):
    catalogue = Catalogue("x.", 3)
    cluster = NoCluster(catalogue)
    wanted = provisioning.plan(cluster, catalogue, client)
    subjects = catalogue.subjects()
    assert {c.subject for c in wanted.changes} == set(subjects)
    assert {type(c) for c in wanted.changes} == {SetCompatibility, RegisterSchema}
    assert fake.subjects == {}
    assert fake.levels == {}
    assert provisioning.registered_ids(catalogue, client) == {}
    provisioning.apply(cluster, wanted, client)
    provisioning.apply(cluster, wanted, client)
    assert set(fake.levels.values()) == {"FULL_TRANSITIVE"}
    assert provisioning.plan(cluster, catalogue, client).is_empty
    ids = provisioning.registered_ids(catalogue, client)
    assert set(ids) == set(packaged())
    assert client.schema_text(ids["loom.Envelope"]) == packaged()["loom.Envelope"].text


def test_a_plan_with_schemas_needs_its_registry():
    with pytest.raises(ValueError, match="registry"):
        provisioning.apply(None, Plan("x.", (RegisterSchema("s", "loom.Envelope"),)))


def test_a_schema_that_does_not_go_with_the_older_ones_is_refused(client):
    with pytest.raises(SchemaRefusedError, match="'incompatible-loom.Envelope'.*topic_prefix") as refused:
        client.register("incompatible-loom.Envelope", packaged()["loom.Envelope"].text)
    assert refused.value.exit_status == 2


def test_an_id_that_the_registry_lost_is_a_typed_error(client):
    with pytest.raises(SchemaUnreadableError, match="registry id 99"):
        client.schema_text(99)


def test_the_subject_is_one_part_of_the_path(fake, client):
    client.compatibility("a/b c?d")
    assert fake.seen[-1][1] == "/config/a%2Fb%20c%3Fd"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {}), UnreachableError),
        ((503, b"<html>"), UnreachableError),
        ((401, {}), RegistryError),
        ((302, {}), RegistryError),
        ((200, b"<html>"), RegistryError),
        ((200, b"[" * 100_000), RegistryError),
        ((200, {"schema": 5}), SchemaUnreadableError),
        ((200, {"schema": "{}", "schemaType": "JSON"}), SchemaUnreadableError),
        ((200, []), SchemaUnreadableError),
        ((200, b" " * (MAX_ANSWER_BYTES + 1)), UnreachableError),
    ],
    ids=str,
)
def test_strange_answers_are_typed_errors(fake, client, answer, error):
    fake.answer = answer
    with pytest.raises(error):
        client.schema_text(1)


@pytest.mark.parametrize(
    "answer", [(200, {}), (200, {"id": "7"}), (200, {"id": True}), (200, {"id": -1}), (200, None)], ids=str
)
def test_an_id_must_be_one(fake, client, answer):
    fake.answer = answer
    with pytest.raises(RegistryError, match="no id"):
        client.register("s", "{}")
    with pytest.raises(RegistryError, match="no id"):
        client.find("s", "{}")


def test_user_and_password_are_sent_and_never_shown(fake):
    client = SchemaRegistry(fake.url.replace("http://", "http://alice:hunter%202@"), timeout_s=2)
    client.compatibility("s")
    assert base64.b64decode(fake.seen[-1][2].removeprefix("Basic ")) == b"alice:hunter 2"
    assert "hunter" not in client.address
    fake.answer = (500, {})
    with pytest.raises(UnreachableError) as refused:
        client.compatibility("s")
    assert "hunter" not in str(refused.value)
    assert "registry_url" in str(refused.value)


def test_a_silent_registry_is_unreachable_within_its_bound():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(UnreachableError, match="no answer in time") as refused:
            SchemaRegistry(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3).schema_text(1)
        assert time.monotonic() - begun < 3
        assert refused.value.exit_status == 3


def test_a_closed_port_is_unreachable():
    with pytest.raises(UnreachableError, match="http://127.0.0.1:1 "):
        SchemaRegistry("http://127.0.0.1:1").compatibility("s")


@pytest.mark.parametrize(
    "url", ["", "registry:8081", "ftp://x", "http://", "file:///etc/passwd", "http://x:port"]
)
def test_what_is_no_url_is_refused_by_its_setting(url):
    with pytest.raises(ConfigError, match="registry_url"):
        SchemaRegistry(url)
