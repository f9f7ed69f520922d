"""The export for Strimzi: the same text every time, compared with the committed one."""

import json
import re
from pathlib import Path

import pytest

from loom.topics.catalogue import Catalogue
from loom.topics.strimzi import strimzi

GOLDEN = Path(__file__).parent / "strimzi.golden.yaml"


def test_equals_the_golden_file():
    assert strimzi(Catalogue("loom.", 8, 3), cluster="kafka") == GOLDEN.read_text(encoding="utf-8")


def test_every_topic_and_role_has_one_document_with_the_cluster_label():
    documents = strimzi(Catalogue("Loom_x.", 6, 3), cluster="prod").split("---\n")[1:]
    assert [re.search(r"^kind: (\w+)$", d, re.MULTILINE)[1] for d in documents] == ["KafkaTopic"] * 11 + [
        "KafkaUser"
    ] * 4
    assert all("    strimzi.io/cluster: prod\n" in d for d in documents)
    names = [re.search(r"^  name: (.+)$", d, re.MULTILINE)[1] for d in documents]
    assert len(set(names)) == 15
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) for name in names)
    assert "  topicName: Loom_x.executions\n" in documents[0]


@pytest.mark.parametrize("prefix", ["null", "1.", "-", "no", "a-b_C."])
def test_whatever_yaml_could_misread_is_quoted(prefix):
    text = strimzi(Catalogue(prefix, 1), cluster="k")
    written = re.search(r"^  topicName: (.+)$", text, re.MULTILINE)[1]
    assert written in {f"{prefix}executions", json.dumps(f"{prefix}executions")}
    assert not re.search(r": (null|no|yes|-|~)$", text, re.MULTILINE)
