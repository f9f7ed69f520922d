"""What is decided: the fold, the flow machine, the inbox rule, the guard. Pure: no I/O, no clock, no randomness."""

from loom.kernel.commands import (
    Abandon,
    Arm,
    Command,
    Complete,
    ContinueAsNew,
    Fail,
    PublishRecord,
    RecordDecision,
    RunStep,
    SendMessage,
    StartChild,
    Wait,
)
from loom.kernel.context import (
    CHILD_TOPIC_PREFIX,
    ChildHandle,
    Context,
    Selected,
    child,
    child_topic,
    gate,
    receive,
    timer,
)
from loom.kernel.flow import FlowDefinition, FlowRegistry, collect_flows, flow
from loom.kernel.guard import SEALED_WALK_BUDGET, Verdict, assert_deliverable, check_ingest, inspect_payload
from loom.kernel.machine import MAX_ERROR_CHARS, DecisionSources, FlowMachine, RunInfo
from loom.kernel.retry import NO_RETRY, RetryPolicy
from loom.kernel.values import dump_json, load_json

__all__ = [
    "CHILD_TOPIC_PREFIX",
    "MAX_ERROR_CHARS",
    "NO_RETRY",
    "SEALED_WALK_BUDGET",
    "Abandon",
    "Arm",
    "ChildHandle",
    "Command",
    "Complete",
    "Context",
    "ContinueAsNew",
    "DecisionSources",
    "Fail",
    "FlowDefinition",
    "FlowMachine",
    "FlowRegistry",
    "PublishRecord",
    "RecordDecision",
    "RetryPolicy",
    "RunInfo",
    "RunStep",
    "Selected",
    "SendMessage",
    "StartChild",
    "Verdict",
    "Wait",
    "assert_deliverable",
    "check_ingest",
    "child",
    "child_topic",
    "collect_flows",
    "dump_json",
    "flow",
    "gate",
    "inspect_payload",
    "load_json",
    "receive",
    "timer",
]
