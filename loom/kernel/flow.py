"""Flows: an ``async def`` with a name, and the types of what goes in and comes out."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from loom.errors import ConfigError, InvalidInputError, UnknownFlowError
from loom.kernel.values import annotation_of, dump_json, load_json, output_model

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from types import ModuleType

    from loom.schemas.envelope import Json

P = ParamSpec("P")
R = TypeVar("R")


class FlowDefinition(Generic[P, R]):
    """A flow: a name that logs carry, and the function that they replay. Calling it calls the function.

    ``takes_input`` says whether the function has a parameter after the context; ``input_model`` is its annotation,
    ``output_model`` the annotation of the result (None: plain JSON, passed on as it is).
    """

    def __init__(self, name: str, fn: Callable[P, Coroutine[Any, Any, R]]) -> None:
        self.name = name
        self.fn = fn
        self.takes_input, self._input_parameter = _input_parameter(name, fn)
        functools.update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function: a coroutine, as undecorated."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<flow {self.name!r}>"

    @functools.cached_property
    def input_model(self) -> Any:
        """The type that the input is validated into; None for plain JSON. Resolved late: types may follow the flow.

        Raises:
            ConfigError: the annotation cannot be resolved.
        """
        annotation = annotation_of(self.fn, self._input_parameter)
        return None if annotation is Any or annotation is object else annotation

    @functools.cached_property
    def output_model(self) -> Any:
        """The type that the result is validated into where it is read; None for plain JSON."""
        return output_model(self.fn)

    def parse_input(self, value: Json) -> Any:
        """Turn recorded JSON into the flow's argument.

        Raises:
            InvalidInputError: it does not fit the annotation; no byte of the value is in the message.
        """
        what = f"input of flow {self.name!r}"
        if self.takes_input:
            return load_json(value, self.input_model, what)
        if value is not None:
            raise InvalidInputError(what, "this flow takes no input", "start it without one")
        return None

    def dump(self, value: Any, what: str | None = None) -> Json:
        """Turn an argument or a result into JSON.

        Raises:
            InvalidInputError: it has no JSON form.
        """
        return dump_json(value, what or f"a value of flow {self.name!r}")

    def accept_input(self, value: Any) -> Json:
        """Turn what a caller gives to ``start`` into JSON that the flow is known to take."""
        data = self.dump(value, f"input of flow {self.name!r}")
        self.parse_input(data)
        return data

    def load_output(self, value: Json) -> Any:
        """Turn a recorded result into the flow's declared type."""
        return load_json(value, self.output_model, f"result of flow {self.name!r}")


def _input_parameter(name: str, fn: Callable[..., Any]) -> tuple[bool, str]:
    problem = None
    if not inspect.iscoroutinefunction(fn):
        problem = "a flow is an async def"
    positional = [
        p
        for p in inspect.signature(fn).parameters.values()
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    if not positional:
        problem = "a flow takes the context as its first parameter"
    elif len(required) > 2:  # noqa: PLR2004 - context and input
        problem = "a flow takes the context and at most one input"
    if problem:
        raise ConfigError(f"flow {name!r}", problem, "write async def name(ctx: Context, input: Model)")
    return (len(positional) > 1, positional[1].name if len(positional) > 1 else "")


def flow(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], FlowDefinition[P, R]]:
    """Name an ``async def`` as a flow: ``@flow("order")``. Returns the definition; nothing is registered anywhere.

    Raises:
        ConfigError: the name is empty, or the function is not ``async def name(ctx[, input])``.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError("flow", "a flow needs a name", 'write @flow("order")')
    return functools.partial(FlowDefinition, name)


class FlowRegistry:
    """The flows that a node can run, by name."""

    def __init__(self, flows: Iterable[FlowDefinition[..., Any]] = ()) -> None:
        self._flows: dict[str, FlowDefinition[..., Any]] = {}
        for definition in flows:
            self.add(definition)

    def add(self, definition: FlowDefinition[..., Any]) -> None:
        """Add a flow; adding the same one again changes nothing.

        Raises:
            ConfigError: another flow has that name.
        """
        known = self._flows.setdefault(definition.name, definition)
        if known is not definition:
            raise ConfigError(
                f"flow {definition.name!r}",
                f"defined both in {known.fn.__module__} and {definition.fn.__module__}",
                "rename one of them",
            )

    def get(self, name: str) -> FlowDefinition[..., Any]:
        """The flow of that name.

        Raises:
            UnknownFlowError: there is none on this node.
        """
        try:
            return self._flows[name]
        except KeyError:
            raise UnknownFlowError(name, tuple(self._flows)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._flows

    def __iter__(self) -> Iterator[FlowDefinition[..., Any]]:
        return iter(self._flows.values())

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order of registration."""
        return tuple(self._flows)


def collect_flows(module: ModuleType) -> list[FlowDefinition[..., Any]]:
    """The flows that a module holds under its own names, each once, in order of definition."""
    found: dict[int, FlowDefinition[..., Any]] = {}
    for value in vars(module).values():
        if isinstance(value, FlowDefinition):
            found.setdefault(id(value), value)
    return list(found.values())
