"""A Confluent-compatible schema registry, asked over plain HTTP.

Only provisioning writes to it. Nodes ask it for ids at start and for schemas that nothing else explains; whether it
answers or not, the log can be read (see ``loom.schemas.table``). Every call ends within ``timeout_s``.
"""

from __future__ import annotations

import base64
import json
import ssl
import time
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from loom.errors import (
    ConfigError,
    RegistryError,
    SchemaRefusedError,
    SchemaUnreadableError,
    UnreachableError,
)

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.parse import SplitResult

SETTING: Final = "registry_url"
COMPATIBILITY: Final = "FULL_TRANSITIVE"
"""Old and new readers read old and new records, all versions of them."""

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
_MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_SERVER_SIDE: Final = 500


class SchemaRegistry:
    """A registry by its URL, with or without a user and password in it; neither is ever shown."""

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            ConfigError: it is no http or https URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or not _has_port(parts):
            raise ConfigError(
                SETTING, "it is no http or https URL", "give http://HOST:PORT or https://HOST:PORT"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        netloc = host if parts.port is None else f"{host}:{parts.port}"
        self._base = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))
        self._headers = {"Accept": f"{_MEDIA_TYPE}, application/json", "Content-Type": _MEDIA_TYPE}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(secret).decode()
        self._timeout_s = timeout_s
        self._opener = build_opener(
            ProxyHandler(), HTTPSHandler(context=ssl.create_default_context()), _NoRedirect()
        )

    @property
    def address(self) -> str:
        """The URL without user and password."""
        return self._base

    def schema_text(self, registry_id: int) -> str:
        """Return the schema of an id.

        Raises:
            SchemaUnreadableError: there is none. UnreachableError, RegistryError: no answer, or another kind of one.
        """
        status, body = self._ask("GET", f"/schemas/ids/{registry_id}", "read a schema")
        if status == _NOT_FOUND:
            raise SchemaUnreadableError(f"of registry id {registry_id}", "the registry does not know it")
        text = body.get("schema") if isinstance(body, dict) else None
        if not isinstance(text, str) or body.get("schemaType", "AVRO") != "AVRO":
            raise SchemaUnreadableError(
                f"of registry id {registry_id}", "the registry gives no Avro schema for it"
            )
        return text

    def find(self, subject: str, text: str) -> int | None:
        """Return the id under which a schema is registered, None where it is not.

        Raises:
            UnreachableError, RegistryError: no answer, or another kind of one.
        """
        status, body = self._ask(
            "POST", f"/subjects/{quote(subject, safe='')}", "look up a schema", {"schema": text}
        )
        return None if status == _NOT_FOUND else _integer(body, "id", "look up a schema")

    def register(self, subject: str, text: str) -> int:
        """Register a schema, once; return its id.

        Raises:
            SchemaRefusedError: it is not compatible. UnreachableError, RegistryError: no answer, or another kind of one.
        """
        path = f"/subjects/{quote(subject, safe='')}/versions"
        status, body = self._ask("POST", path, "register a schema", {"schema": text})
        if status in {_CONFLICT, 422}:
            raise SchemaRefusedError(subject, status)
        return _integer(body, "id", "register a schema")

    def compatibility(self, subject: str) -> str | None:
        """Return the compatibility level set for a subject, None where the registry's default holds.

        Raises:
            UnreachableError, RegistryError: no answer, or another kind of one.
        """
        status, body = self._ask("GET", f"/config/{quote(subject, safe='')}", "read a compatibility level")
        level = body.get("compatibilityLevel") if status != _NOT_FOUND and isinstance(body, dict) else None
        return level if isinstance(level, str) else None

    def set_compatibility(self, subject: str, level: str = COMPATIBILITY) -> None:
        """Set the compatibility level of a subject.

        Raises:
            UnreachableError, RegistryError: no answer, or another kind of one.
        """
        path = f"/config/{quote(subject, safe='')}"
        status, _ = self._ask("PUT", path, "set a compatibility level", {"compatibility": level})
        if status == _NOT_FOUND:
            raise RegistryError("set a compatibility level", f"status {status}")

    def _ask(self, method: str, path: str, doing: str, body: dict[str, str] | None = None) -> tuple[int, Any]:
        """Return status and JSON of an answer; only 404, 409 and 422 of the failures are the caller's business."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._base + path, data=data, headers=self._headers, method=method)  # noqa: S310 - http(s) only
        until = time.monotonic() + self._timeout_s
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return int(answer.status), _json(_read(answer, until), doing)
        except HTTPError as error:
            with error:
                if error.code in {_NOT_FOUND, _CONFLICT, 422}:
                    return error.code, None
                if error.code >= _SERVER_SIDE:
                    raise UnreachableError(
                        "the schema registry", self._base, SETTING, f"status {error.code}"
                    ) from None
                raise RegistryError(doing, f"status {error.code}") from None
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            problem = "no answer in time" if isinstance(reason, TimeoutError) else type(reason).__name__
            raise UnreachableError("the schema registry", self._base, SETTING, problem) from None


class _NoRedirect(HTTPRedirectHandler):
    """A registry that sends elsewhere is refused: the credentials were given for this one."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


def _has_port(parts: SplitResult) -> bool:
    """Whether the port is a number, or left out."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _read(answer: HTTPResponse, until: float) -> bytes:
    """Return the body; no slow sender holds a caller for longer than about twice the timeout."""
    body = bytearray()
    while chunk := answer.read1(65536):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES or time.monotonic() > until:
            raise TimeoutError
    return bytes(body)


def _json(raw: bytes, doing: str) -> Any:
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        raise RegistryError(doing, "no JSON") from None


def _integer(body: Any, key: str, doing: str) -> int:
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise RegistryError(doing, f"no {key}")
    return value
