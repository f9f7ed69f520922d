"""Removing what has ended, from the command line."""

import time

ORDER = '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}'
PATIENCE_S = 60


def test_purge_then_delete(loom, worker):
    loom.env(LOOM_ACCESS__OPERATORS="ops")
    order = loom.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    status, said = loom.error("purge", order, "--as", "ops")
    assert (status, said["error"]) == (1, "ExecutionNotFinishedError")
    loom.json("send", order, "elsewhere", '"kept in the inbox"', "--as", "alice")
    assert loom("cancel", order, "--as", "alice").status == 0
    status, said = loom.error("purge", order, "--as", "alice")
    assert (status, said["error"]) == (1, "ExecutionDeniedError")

    planned = loom.json("purge", order, "--dry-run", "--as", "ops")
    assert planned["dry_run"]
    assert any("elsewhere" in stream for stream in planned["streams"]), "what nobody read goes, too"
    done = loom.json("purge", order, "--reason", "closed", "--as", "ops")
    assert done["events"] == planned["events"] > 0
    told = loom("show", order, "--as", "alice").out
    assert "history removed by ops" in told
    assert "cancelled" in told
    assert loom.json("purge", order, "--as", "ops")["events"] == 0

    assert "would remove" in loom("delete", order, "--dry-run", "--as", "ops").out
    assert loom.json("delete", order, "--reason", "a test", "--as", "ops")["executions"] == [order]
    assert loom("show", order, "--as", "alice").status == 1
    status, said = loom.error("start", "order", "--input", ORDER, "--id", order, "--as", "alice")
    assert said["error"] == "ExecutionAlreadyExistsError"
    gone(loom, order)


def gone(loom, order):
    """Wait until ``loom list`` knows it no more: the fold has seen the tombstone."""
    deadline = time.monotonic() + PATIENCE_S
    while any(row["execution_id"] == order for row in loom.json("list", "--limit", "1000")):
        assert time.monotonic() < deadline, "it is still listed"
        time.sleep(0.2)
