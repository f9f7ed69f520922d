"""Replay a flow against a history, without a store (system.md 8.10): does today's code still match it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loom.errors import InvalidInputError
from loom.kernel.info import DecisionSources
from loom.kernel.machine import FlowMachine
from loom.kernel.state import ExecutionState, fold
from loom.runtime.facts import info_of
from loom.schemas.envelope import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.kernel.commands import Command
    from loom.kernel.flow import FlowDefinition
    from loom.schemas.envelope import Envelope


def replay(flow: FlowDefinition[..., Any], history: Sequence[Envelope]) -> list[Command]:
    """Replay ``history`` (events of one log, from sequence 0) into ``flow``; nothing runs, nothing is written.

    Returns what the flow asks for at the end of the history: empty where the history ended the execution.

    Raises:
        FlowDivergedError: the code left the log; the message names the first event that it did not ask for.
        InvalidInputError: the history does not begin with EXECUTION_STARTED.
    """
    if not history or history[0].type != Kind.EXECUTION_STARTED:
        raise InvalidInputError("history", "it does not begin with EXECUTION_STARTED", "pass a whole log")
    state = ExecutionState(answers=None)
    for envelope in history:
        fold(state, envelope)
    last = history[-1].timestamp
    machine = FlowMachine(
        flow, info_of(state), DecisionSources(lambda: last, lambda: 0.5, lambda: "replayed")
    )
    try:
        commands = machine.replay(history)
    finally:
        machine.close()
    return [] if state.finished else commands
