"""The catalogue as Kubernetes resources of Strimzi: KafkaTopic and KafkaUser, for clusters that are kept that way."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from loom.topics.access import ROLES, acls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loom.topics.catalogue import Catalogue

API_VERSION: Final = "kafka.strimzi.io/v1"
_ILLEGAL: Final = re.compile(r"[^a-z0-9.-]+")
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9./_-]*")
_YAML_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def strimzi(catalogue: Catalogue, *, cluster: str, api_version: str = API_VERSION) -> str:
    """Return one YAML document for each topic, then one for each role; the same text for the same catalogue.

    ``cluster`` is the name of the Kafka resource. Users authenticate by TLS; change that where the cluster does it
    otherwise.
    """
    documents = [*_topics(catalogue, cluster, api_version), *_users(catalogue, cluster, api_version)]
    return "".join(f"---\n{''.join(_lines(document, 0))}" for document in documents)


def _topics(catalogue: Catalogue, cluster: str, api_version: str) -> Iterator[dict[str, Any]]:
    for topic in catalogue.topics():
        yield {
            "apiVersion": api_version,
            "kind": "KafkaTopic",
            "metadata": _metadata(topic.name, cluster),
            "spec": {
                "topicName": topic.name,
                "partitions": topic.partitions,
                "replicas": topic.replicas,
                "config": {name: _scalar_of(value) for name, value in topic.settings.items()},
            },
        }


def _users(catalogue: Catalogue, cluster: str, api_version: str) -> Iterator[dict[str, Any]]:
    for role, meaning in ROLES.items():
        rules = [
            {
                "resource": {"type": acl.resource, "name": acl.name, "patternType": acl.pattern},
                "operations": list(acl.operations),
                "host": "*",
            }
            for acl in acls(catalogue)
            if acl.role == role
        ]
        yield {
            "apiVersion": api_version,
            "kind": "KafkaUser",
            "metadata": {
                **_metadata(f"{catalogue.prefix}{role}", cluster),
                "annotations": {"loom/role": meaning},
            },
            "spec": {"authentication": {"type": "tls"}, "authorization": {"type": "simple", "acls": rules}},
        }


def _metadata(name: str, cluster: str) -> dict[str, Any]:
    """Names of resources are lower case; the topic's own name is in its spec."""
    resource = _ILLEGAL.sub("-", name.lower()).strip(".-")
    return {"name": resource, "labels": {"strimzi.io/cluster": cluster}}


def _scalar_of(value: str) -> str | int | bool:
    if value in {"true", "false"}:
        return value == "true"
    return int(value) if re.fullmatch(r"-?\d+", value) else value


def _lines(value: dict[str, Any], indent: int) -> Iterator[str]:
    pad = " " * indent
    for key, item in value.items():
        if isinstance(item, dict):
            yield f"{pad}{key}:\n"
            yield from _lines(item, indent + 2)
        elif isinstance(item, list):
            yield f"{pad}{key}:\n"
            for entry in item:
                if isinstance(entry, dict):
                    first, *rest = _lines(entry, indent + 4)
                    yield f"{pad}  - {first.lstrip()}"
                    yield from rest
                else:
                    yield f"{pad}  - {_scalar(entry)}\n"
        else:
            yield f"{pad}{key}: {_scalar(item)}\n"


def _scalar(value: str | int | bool) -> str:
    """Quote whatever YAML could take for something else."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
