import pytest

from loom import errors
from loom.errors import DecodeError
from loom.schemas import records
from loom.schemas.codec import Codec
from loom.schemas.envelope import NewEvent
from loom.stores import ops
from loom.stores.contracts import Appended, Observation, Outgoing, Snapshot, StreamAppend
from loom.stores.kafka import wire

CODEC = Codec()
EVENT = NewEvent("e1", "STEP_COMPLETED", {"a": [1, None, "x"]}, {"node": "n:1", "seal": {"v": 1}})
INNER = StreamAppend("__loom_inbox__:c2:t", (NewEvent("m1", "INBOX_MESSAGE", {"payload": 1}),), backlog_cap=5)

OPS = [
    ops.AppendOps(
        (
            StreamAppend(
                "c1",
                (EVENT, NewEvent("e2", "EXECUTION_COMPLETED", {})),
                expected_head=-1,
                fence=1,
                consumed=(("__loom_inbox__:c1:t", 3),),
                outgoing=(
                    Outgoing("request", "r1", "c2", INNER),
                    Outgoing("publish", "p1", "k", b"\x00value", topic="out", headers=(("h", b"v"),)),
                ),
            ),
            StreamAppend(
                "__loom_inbox__:c1", (EVENT,), observation=Observation(4, 2, "anchor"), backlog_cap=9
            ),
        )
    ),
    ops.AcquireFence("c1", "n:1"),
    ops.AcquireFence("c1", "n:1", Observation(3, 1, None)),
    ops.Truncate("c1", 9),
    ops.Delete("c1"),
    ops.CopyPrefix("c1", "c3", 4),
    ops.SaveSnapshot(Snapshot("c1", 3, {"s": {}}, {"m": 1})),
    ops.SaveSnapshot(Snapshot("c1", 3, {"s": {}})),
    ops.DeleteSnapshot("c1"),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_every_write_arrives_as_it_was_asked(op):
    sent = CODEC.encode(records.AppendRequest("r", wire.request_op(op, CODEC), "node", 3, 1000))
    request = CODEC.decode(sent, records.AppendRequest)
    assert (request.id, request.requester, request.reply_partition, request.timeout_ms) == (
        "r",
        "node",
        3,
        1000,
    )
    assert wire.write_op(request.op, CODEC) == op


def test_every_write_but_the_tick_can_be_asked_for():
    asked = {type(op) for op in OPS}
    assert asked == set(ops.WriteOp.__args__) - {ops.Tick}


@pytest.mark.parametrize(
    "op", [records.ReadOp("events", "c1"), records.NotifyOp("c1"), records.CancelOp("r")]
)
def test_what_is_no_write_is_told_apart(op):
    assert wire.write_op(op, CODEC) is None


def test_an_outgoing_request_is_an_append_that_nobody_waits_for():
    request = CODEC.decode(
        wire.outgoing_request(Outgoing("request", "r1", "c2", INNER), CODEC), records.AppendRequest
    )
    assert (request.id, request.requester, request.timeout_ms) == ("r1", None, None)
    assert wire.write_op(request.op, CODEC) == ops.AppendOps((INNER,))


@pytest.mark.parametrize(
    "result", [[Appended("c1", 0, 2, 17), Appended("c2", 1, 1, 17, repeated=True)], 7, None]
)
def test_a_result_crosses(result):
    sent = CODEC.encode(wire.append_reply("r", result, None))
    assert wire.append_result(CODEC.decode(sent, records.AppendReply)) == result


ERRORS = [
    errors.WrongHeadError("s", 1, 2),
    errors.StaleFenceError("s", 1, 2),
    errors.ExecutionAlreadyExistsError("s"),
    errors.ExecutionNotFoundError("s"),
    errors.InboxFullError("s", "t", 3, 3),
    errors.InvalidInputError("w", "p", "r"),
    errors.InvalidIdError("i", "r"),
    errors.PayloadTooLargeError("s", 10, 5),
    errors.StorageWriteError("s", "p"),
    errors.OutcomeUnknownError("s", "p"),
    errors.NotOwnerError(3),
    errors.StreamBrokenError("s", 3, "p"),
    errors.DecodeError("w", "p"),
    errors.PublishRefusedError("t", "r", "x"),
    errors.BrokerError("d", "c"),
    errors.IncompleteReadError("t", 1, 2, 3),
    wire.RequestExpiredError("r"),
    wire.RequestUnsettledError("r"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_is_raised_as_what_it_was(error):
    sent = CODEC.encode(wire.append_reply("r", None, error))
    with pytest.raises(type(error)) as caught:
        wire.append_result(CODEC.decode(sent, records.AppendReply))
    assert type(caught.value) is type(error)
    assert vars(caught.value) == vars(error)
    assert str(caught.value) == str(error)


def test_the_table_of_errors_is_tested_whole():
    assert {type(e).__name__ for e in ERRORS} == set(wire._ERRORS)


def test_an_unknown_error_is_still_a_refusal():
    with pytest.raises(wire.OwnerRefusedError):
        wire.append_result(records.AppendReply("r", records.ErrorReport("FutureError", {})))
    with pytest.raises(wire.OwnerRefusedError):
        wire.append_result(records.AppendReply("r", records.ErrorReport("WrongHeadError", {"bad": 1})))
    sent = CODEC.encode(wire.append_reply("r", None, ValueError("secret payload")))
    assert b"secret" not in sent


def test_a_request_inside_a_request_is_read_or_refused():
    op = records.AppendOp(
        (
            records.AppendRecord(
                "s", (EVENT,), outgoing=(records.OutgoingRecord("request", "i", "k", b"junk"),)
            ),
        )
    )
    with pytest.raises(DecodeError):
        wire.write_op(op, CODEC)
