"""Holding, looking at what is held, and letting it go, from the command line, against a worker without keys."""

ORDER = '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}'


def test_hold_look_drop(loom, worker, tmp_path):
    loom.env(LOOM_ACCESS__OPERATORS="ops")
    order = loom.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    # A sender with keys of its own; neither the worker nor this command line can open what it sends.
    loom.env(
        LOOM_SEALING__KEYS=f"file:{tmp_path / 'keys'}", LOOM_SEALING__KEK="env:A_KEK", A_KEK="A" * 43 + "="
    )
    loom.json("send", order, "ship", '{"carrier": "post"}', "--message-id", "m1", "--as", "alice")
    loom("send", order, "ship", '{"carrier": "post"}', "--message-id", "m2", "--as", "alice")
    for name in ("LOOM_SEALING__KEYS", "LOOM_SEALING__KEK"):
        loom.unset(name)

    hold = ("quarantine", order, "ship", "--message-id", "m1", "--reason", "no key", "--as", "ops")
    assert loom.json(*hold, "--dry-run")["dry_run"]
    status, said = loom.error(*hold[:-1], "alice")
    assert (status, said["error"]) == (1, "ExecutionDeniedError")
    first = loom.json(*hold)
    assert (first["message_id"], first["changed"]) == ("m1", True)
    assert loom.json(*hold)["changed"] is False

    rows = loom.json("inbox", order, "--as", "alice")
    assert [(r["message_id"], r["state"]) for r in rows if r["topic"] == "ship"] == [
        ("m1", "held"),
        ("m2", "behind a hold"),
    ]
    assert (rows[0]["held_by"], rows[0]["reason"], rows[0]["awaits"]) == ("ops", "no key", "a capable node")
    told = loom("inbox", order, "--as", "alice").out
    assert "capable" in told
    assert [row["execution_id"] for row in loom.json("held") if row["topic"] == "ship"] == [order]
    assert "held at message m1 by ops" in loom("show", order, "--as", "alice").out

    status, said = loom.error("release", order, "ship", "m1", "--as", "ops")
    assert (status, said["error"]) == (1, "SealedPayloadUnreadableError")
    drop = ("release", order, "ship", "m1", "--discard", "--reason", "lost", "--as", "ops")
    assert loom.json(*drop, "--dry-run") == {"changed": True, "dry_run": True}
    assert loom.json(*drop)["changed"] is True
    assert loom.json(*drop)["changed"] is False
    status, said = loom.error("quarantine", order, "cancel", "--as", "ops")
    assert (status, said["error"]) == (1, "InboxQuarantineRefusedError")

    assert loom.json("discard", order, "ship", "--message-id", "m2", "--as", "ops")["discarded"] == 1
    loom.json("send", order, "ship", '{"carrier": "bike"}', "--message-id", "m3", "--as", "alice")
    assert "completed" in loom("tail", order, "--as", "alice").out
    assert loom.json("held") == []


def test_what_has_waited_too_long_is_passed_over(loom, worker):
    order = loom.json("start", "order", "--input", ORDER, "--as", "alice")["execution_id"]
    loom.json("send", order, "elsewhere", "1", "--as", "alice")
    asked = ("expire", order, "elsewhere", "--older-than", "0", "--as", "alice")
    assert loom.json(*asked, "--dry-run") == {"expired": 0, "would_expire": 0}, "nobody reads the topic yet"
    assert loom.json(*asked, "--reason", "old")["expired"] == 1
    assert loom("cancel", order, "--as", "alice").status == 0
