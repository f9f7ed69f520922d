"""Who may do what to an execution (system.md 0, "Access"; clauses.md, point 1)."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol

from loom.errors import UNKNOWN_OWNER_REASON, ExecutionDeniedError, ExecutionNotFoundError, LoomError
from loom.kernel.readable import assert_person_readable, is_dressed

if TYPE_CHECKING:
    from loom.schemas.envelope import Envelope, Json

OPERATOR_OPS: Final = frozenset({"discard", "quarantine", "release", "purge", "delete"})
"""Verbs that destroy or withhold what was written: a principal is required, and the owner is no exception."""

SUBJECT_OPS: Final = frozenset({"erase", "export"})
"""Verbs on all that belongs to a subject: for operators, and for who owns every execution of it."""

POLICY_FAILED_REASON: Final = "the access policy failed"
PRINCIPAL_REQUIRED_REASON: Final = "a principal is required"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who acts. ``actor`` names them; ``identity`` is what an authenticator vouched for (tenant, roles, ...).

    A caller without ``identity`` is told of a missing id what it is told of a foreign one: a denial.
    """

    actor: str
    identity: Mapping[str, Json] | None = None

    def to_json(self) -> dict[str, Json]:
        """As recorded in EXECUTION_STARTED."""
        if self.identity is None:
            return {"actor": self.actor}
        return {"actor": self.actor, "identity": dict(self.identity)}


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """What an authorizer judges. ``owner`` is None where it is unknown; ``workflow`` is then empty."""

    op: str
    execution_id: str
    workflow: str
    principal: Principal | None
    owner: Principal | None


class Authorizer(Protocol):
    """Judges a request: None allows it, a string denies it and is the reason given to the caller.

    For an owner that it does not know, an authorizer should deny with ``loom.errors.UNKNOWN_OWNER_REASON``: a refusal
    to read a sealed log is worded the same.
    """

    def __call__(self, request: AccessRequest) -> str | Awaitable[str | None] | None:
        """Return None to allow, else why not."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutionAccessPolicy:
    """The default authorizer: the owner may, others may not; see :func:`execution_access_policy`."""

    unknown_owner: Literal["deny", "allow"] = "deny"
    operators: frozenset[str] = frozenset()
    allow_workflows: frozenset[str] | None = None

    def __call__(self, request: AccessRequest) -> str | None:
        """See :class:`Authorizer`."""
        denied = self.before_reading(request)
        if denied is not None or request.op in OPERATOR_OPS:
            return denied
        principal = request.principal
        if request.op in SUBJECT_OPS and principal is not None and principal.actor in self.operators:
            return None
        if self.allow_workflows is not None and request.workflow not in self.allow_workflows:
            return "the workflow is not one that this node gives access to"
        if request.owner is None:
            return None if self.unknown_owner == "allow" else UNKNOWN_OWNER_REASON
        return None if _same(request.owner, request.principal) else "the caller is not its owner"

    def before_reading(self, request: AccessRequest) -> str | None:
        """What can be denied without knowing the execution, so that a denial tells nothing of its existence."""
        if request.op in OPERATOR_OPS and (
            request.principal is None or request.principal.actor not in self.operators
        ):
            return f"{request.op!r} is not permitted"
        return None


def execution_access_policy(
    *,
    unknown_owner: Literal["deny", "allow"] = "deny",
    operators: Iterable[str] = (),
    allow_workflows: Iterable[str] | None = None,
) -> ExecutionAccessPolicy:
    """Return the default policy.

    The owner (the principal recorded in EXECUTION_STARTED) may do everything but ``discard``, ``quarantine``,
    ``release``, ``purge`` and ``delete``; these are for ``operators``, who may also erase and export any subject. An execution whose owner is unknown is denied to everybody unless
    ``unknown_owner="allow"``, which is unsafe. ``allow_workflows`` limits access to these workflows.
    """
    workflows = None if allow_workflows is None else frozenset(allow_workflows)
    return ExecutionAccessPolicy(unknown_owner, frozenset(operators), workflows)


def owner_of(started: Envelope) -> Principal | None:
    """The owner that an execution's first event records; None where it does not say, or cannot be read here."""
    recorded = started.data.get("principal")
    if (
        not isinstance(recorded, Mapping)
        or not isinstance(recorded.get("actor"), str)
        or is_dressed(recorded)
    ):
        return None
    identity = recorded.get("identity")
    return Principal(recorded["actor"], identity if isinstance(identity, Mapping) else None)


def _same(owner: Principal, caller: Principal | None) -> bool:
    if caller is None or owner.actor != caller.actor:
        return False
    return owner.identity is None or dict(owner.identity) == dict(caller.identity or {})


DeniedCallback = Callable[[AccessRequest, str], Any]


class Gatekeeper:
    """Asks the authorizer, words the denial, tells the callback.

    Without an authorizer of its own the runtime judges callers that name a principal by the default policy, and takes
    a call without one as made by the process itself (the system's grant). With one, every call is judged, and a call
    without a principal is an anonymous caller's.
    """

    def __init__(
        self, authorizer: Authorizer | None, operators: Iterable[str], on_denied: DeniedCallback | None
    ) -> None:
        self._operators = frozenset(operators)
        self._authorizer: Authorizer = authorizer or execution_access_policy(operators=self._operators)
        self._judge_anonymous = authorizer is not None
        self._on_denied = on_denied

    def granted(self, op: str, principal: Principal | None) -> bool:
        """Tell whether the call is the system's own: it is not judged. Operator verbs never are."""
        return principal is None and not self._judge_anonymous and op not in OPERATOR_OPS

    async def before_reading(self, op: str, execution_id: str, principal: Principal | None) -> None:
        """Deny what can be denied before anything is read.

        Raises:
            ExecutionDeniedError: an operator verb without a principal, or one that the policy gives to others.
        """
        if op not in OPERATOR_OPS:
            return
        request = AccessRequest(op, execution_id, "", principal, None)
        if principal is None:
            self._deny(request, PRINCIPAL_REQUIRED_REASON)
        early = getattr(self._authorizer, "before_reading", None)
        reason = early(request) if early is not None else None
        if reason is not None:
            self._deny(request, reason)

    async def judge(
        self, op: str, execution_id: str, started: Envelope | None, principal: Principal | None
    ) -> None:
        """Judge a call on an execution whose first event is ``started`` (None: there is no such execution).

        Raises:
            ExecutionDeniedError: the policy denies it, or the id is missing and the caller has no identity.
            ExecutionNotFoundError: the id is missing, and the caller may know.
            SealedStreamUnreadableError: its owner is recorded, and cannot be read here.
        """
        if self.granted(op, principal):
            if started is None:
                raise ExecutionNotFoundError(execution_id)
            return
        if started is None:
            if principal is not None and principal.identity is not None:
                raise ExecutionNotFoundError(execution_id)
            request = AccessRequest(op, execution_id, "", principal, None)
            self._deny(request, await self._word(request))
        assert_person_readable(started, op=op)
        workflow = str(started.data.get("workflow", ""))
        request = AccessRequest(op, execution_id, workflow, principal, owner_of(started))
        reason = await self._ask(request)
        if reason is not None:
            self._deny(request, reason)

    def trusts(self, op: str, principal: Principal | None) -> bool:
        """Whether the caller is the process itself or an operator: who may know why a log cannot be opened."""
        return self.granted(op, principal) or (principal is not None and principal.actor in self._operators)

    async def judge_subject(
        self, op: str, subject: str, started: Sequence[Envelope], principal: Principal | None
    ) -> None:
        """Judge a call on all executions of a subject; ``started`` are their first events (none: there is none).

        Every denial is that of an unknown owner, and names the subject: it says nothing of what there is.

        Raises:
            ExecutionDeniedError: the policy denies it for one of them, or there is none and the policy does not
                allow it for an unknown owner.
        """
        if self.granted(op, principal):
            return
        unknown = AccessRequest(op, subject, "", principal, None)
        requests = [
            AccessRequest(op, e.stream_id, str(e.data.get("workflow", "")), principal, owner_of(e))
            for e in started
        ]
        for request in requests or [unknown]:
            if await self._ask(request) is not None:
                self._deny(unknown, await self._word(unknown))

    async def word_sealed(self, op: str, execution_id: str, principal: Principal | None) -> str:
        """Word the refusal of a sealed log, and tell the callback as of a denial (system.md 2.4).

        The policy is asked once, with the owner unset; if it allows or fails, the reason is that of an unknown owner.
        """
        request = AccessRequest(op, execution_id, "", principal, None)
        try:
            reason = await self._word(request)
        except LoomError:
            reason = UNKNOWN_OWNER_REASON
        self._tell(request, reason)
        return reason

    async def _ask(self, request: AccessRequest) -> str | None:
        try:
            answer = self._authorizer(request)
            return await answer if inspect.isawaitable(answer) else answer
        except LoomError:
            raise
        except Exception:  # noqa: BLE001 - a policy that fails allows nothing, and its error is not the caller's
            return POLICY_FAILED_REASON

    async def _word(self, request: AccessRequest) -> str:
        """The reason that an existing execution of unknown owner would get, also where the policy allows or fails."""
        reason = await self._ask(request)
        return UNKNOWN_OWNER_REASON if reason in {None, POLICY_FAILED_REASON} else str(reason)

    def _deny(self, request: AccessRequest, reason: str) -> NoReturn:
        self._tell(request, reason)
        raise ExecutionDeniedError(request.op, request.execution_id, reason)

    def _tell(self, request: AccessRequest, reason: str) -> None:
        if self._on_denied is not None and request.op != "query":  # a look that is denied is no event
            self._on_denied(request, reason)
