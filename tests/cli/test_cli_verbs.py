"""The main job through the command line, against a worker process."""

import asyncio
import json
import os

import pytest

from loom.stores.redis.lease_store import RedisLeaseStore

ORDER = '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}'


@pytest.fixture
def fleet(loom, worker):
    return loom


def follow(fleet, execution_id):
    """``loom tail`` ends when the execution does."""
    return fleet("tail", execution_id).out


def test_start_send_show_list(fleet):
    order = fleet.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    fleet.json("send", order, "ship", '{"carrier": "post"}', "--message-id", "m1", "--as", "alice")
    fleet.json("send", order, "ship", '{"carrier": "post"}', "--message-id", "m1", "--as", "alice")
    told = follow_as(fleet, order, "alice")
    assert "completed" in told
    shown = fleet.json("show", order, "--as", "alice")
    kinds = [event["type"] for event in shown["events"]]
    assert kinds[0] == "EXECUTION_STARTED"
    assert kinds[-1] == "EXECUTION_COMPLETED"
    assert kinds.count("MESSAGE_CONSUMED") == 1
    assert [event["sequence"] for event in shown["events"]] == list(range(len(kinds)))
    human = fleet("show", order, "--as", "alice").out
    assert "started order for alice" in human
    assert "took message" in human


def follow_as(fleet, execution_id, name):
    return fleet("tail", execution_id, "--as", name).out


def test_a_stranger_is_denied_and_learns_nothing(fleet):
    order = fleet.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    for command in (["show", order], ["send", order, "ship", "{}"], ["cancel", order]):
        status, said = fleet.error(*command, "--as", "mallory")
        assert (status, said["error"]) == (1, "ExecutionDeniedError")
        assert "alice" not in said["message"]


def test_cancel_ends_an_execution_once(fleet):
    order = fleet.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    fleet.json("cancel", order, "--reason", "ordered twice", "--as", "alice")
    status, said = fleet.error("cancel", order, "--as", "alice")
    assert (status, said["error"]) == (1, "ExecutionFinishedError")
    assert "cancelled" in fleet("show", order, "--as", "alice").out


def test_the_node_and_its_flows_are_announced(fleet):
    rows = fleet.json("leases")
    assert [row["flows"] for row in rows if row["state"] == "live"] == [["order", "loom.schedule"]]


def test_leases_are_shown_with_their_owners(fleet):
    """A row of a driver stands beside its node, and lapses when it says."""
    url, prefix = os.environ["LOOM_REDIS_URL"], os.environ["LOOM_TOPIC_PREFIX"]

    async def lease():
        store = RedisLeaseStore(url, prefix)
        await store.acquire("an-execution", "elsewhere:1", 60_000)
        await store.close()

    asyncio.run(lease())
    (row,) = (row for row in fleet.json("leases") if row["node"] == "elsewhere:1")
    (lease,) = row["leases"]
    assert (row["state"], lease["execution_id"], lease["state"]) == ("unknown", "an-execution", "live")
    assert lease["expires_at"] - lease["acquired_at"] == 60_000
    shown = fleet("leases").out
    assert "an-execution" in shown
    assert "elsewhere:1" in shown
    found = {finding["code"] for finding in json.loads(fleet("doctor", "--json").out)}
    assert "presence-missing" in found


def test_list_follows_the_states_topic(fleet):
    order = fleet.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    fleet.json("cancel", order, "--as", "alice")
    for _ in range(200):
        rows = {row["execution_id"]: row["status"] for row in fleet.json("list", "--limit", "1000")}
        if rows.get(order) == "cancelled":
            break
    assert rows[order] == "cancelled"
