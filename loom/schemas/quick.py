"""Frozen dataclasses that are quick to make.

``dataclass(frozen=True)`` sets each field through ``object.__setattr__``, which makes a value of seven fields four times
as dear as one that may be changed. Values that are made several times for every event are worth an ``__init__`` that
sets the slots directly; they stay frozen.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Give a frozen, slotted dataclass an ``__init__`` that sets its slots directly: ``@quick`` above ``@dataclass(...)``.

    Raises:
        TypeError: it is not such a class, or has a ``__post_init__``, or fields that ``__init__`` neither takes in order nor
            always starts with the same default.
    """
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    plain = parameters is not None and parameters.frozen and "__slots__" in vars(cls)
    if not plain or hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__name__} is no plain frozen, slotted dataclass")
    takes, sets = ["self"], []
    scope: dict[str, Any] = {"MISSING": MISSING}
    for place, field in enumerate(fields(cls)):  # type: ignore[arg-type]
        name = field.name
        if field.kw_only or (not field.init and field.default is MISSING):
            raise TypeError(f"{cls.__name__}.{name} is not taken in order")
        scope[f"set_{place}"] = vars(cls)[name].__set__
        if not field.init:
            scope[f"start_{place}"] = field.default
            sets.append(f"    set_{place}(self, start_{place})")
            continue
        if field.default is not MISSING:
            scope[f"default_{place}"] = field.default
            takes.append(f"{name}=default_{place}")
        elif field.default_factory is not MISSING:
            scope[f"make_{place}"] = field.default_factory
            takes.append(f"{name}=MISSING")
            sets.append(f"    if {name} is MISSING: {name} = make_{place}()")
        else:
            takes.append(name)
        sets.append(f"    set_{place}(self, {name})")
    source = f"def __init__({', '.join(takes)}):\n" + "\n".join(sets or ["    pass"])
    exec(source, scope)  # noqa: S102 - as dataclasses itself does, from names of fields alone
    made = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {field.name: field.type for field in fields(cls) if field.init} | {"return": None}  # type: ignore[arg-type]
    cls.__init__ = made  # type: ignore[method-assign]
    return cls


def changer(cls: type[T], *names: str) -> Callable[..., T]:
    """Return a function of a value and what these fields of it are to be, in this order; it returns the changed copy.

    What ``dataclasses.replace`` does, at a third of its price.

    Raises:
        TypeError: there is no such field, or one that ``__init__`` does not take in order.
    """
    taken = [field.name for field in fields(cls) if field.init and not field.kw_only]  # type: ignore[arg-type]
    if len(taken) != len(fields(cls)) or not set(names) <= set(taken):  # type: ignore[arg-type]
        raise TypeError(f"{cls.__name__} does not take {', '.join(names)} in order")
    given = ", ".join(name if name in names else f"value.{name}" for name in taken)
    scope: dict[str, Any] = {"cls": cls}
    exec(f"def changed(value, {', '.join(names)}): return cls({given})", scope)  # noqa: S102 - from names of fields alone
    made: Callable[..., T] = scope["changed"]
    return made
