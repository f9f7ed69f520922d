"""Frozen dataclasses that are quick to make.

``dataclass(frozen=True)`` sets each field through ``object.__setattr__``, which makes a value of seven fields four times
as dear as one that may be changed. Values that are made several times for every event are worth an ``__init__`` that
sets the slots directly; they stay frozen.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Give a frozen, slotted dataclass an ``__init__`` that sets its slots directly: ``@quick`` above ``@dataclass(...)``.

    Raises:
        TypeError: it is not such a class, or has a ``__post_init__``, or fields that ``__init__`` does not take in order.
    """
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    plain = parameters is not None and parameters.frozen and "__slots__" in vars(cls)
    if not plain or hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__name__} is no plain frozen, slotted dataclass")
    takes, sets = ["self"], []
    scope: dict[str, Any] = {"MISSING": MISSING}
    for place, field in enumerate(fields(cls)):  # type: ignore[arg-type]
        if not field.init or field.kw_only:
            raise TypeError(f"{cls.__name__}.{field.name} is not taken in order")
        name = field.name
        scope[f"set_{place}"] = vars(cls)[name].__set__
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
    made.__annotations__ = {field.name: field.type for field in fields(cls)} | {"return": None}  # type: ignore[arg-type]
    cls.__init__ = made  # type: ignore[method-assign]
    return cls
