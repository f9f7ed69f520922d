import kernel_golden as golden
import pytest
from kernel_support import keys, machine, replayed

from loom.errors import FlowDivergedError
from loom.schemas.envelope import Kind


def test_the_committed_history_replays():
    history = golden.read("order.jsonl")
    assert machine(golden.order, golden.VALUE).replay(history) == []
    commands, m = replayed(golden.order, golden.VALUE, [history[:-1]])
    assert [c[0] for c in commands] == ["Complete"]
    assert m.outcome.output == history[-1].data["output"]


def test_the_committed_history_is_what_the_code_does_today():
    assert golden.drive().history == golden.read("order.jsonl")


def test_the_parked_history_waits_for_what_it_waited_for():
    history = golden.read("order.jsonl")[:15]
    m = machine(golden.order, golden.VALUE)
    commands = m.replay(history)
    (wait,) = m.waiting
    assert keys(commands) == keys([wait])
    assert [(a.kind, a.topic, a.gate) for a in wait.arms] == [
        ("inbox", "cancel", None),
        ("inbox", "ship", None),
        ("timer", None, None),
        ("gate", None, "override"),
    ]


def test_the_history_of_other_code_is_refused_where_it_differs():
    history = golden.read("order-refused.jsonl")
    with pytest.raises(FlowDivergedError) as caught:
        machine(golden.order, golden.VALUE).replay(history)
    error = caught.value
    assert (error.sequence, error.recorded) == (11, f"{Kind.STEP_COMPLETED} 'box-1' at 0.3:0")
    assert "step 'pack-1' at 0.3:0" in error.expected
