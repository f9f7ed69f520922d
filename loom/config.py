"""Settings, from arguments, ``LOOM_*`` variables (``__`` for nesting), ``./loom.toml`` and defaults, in this order.

Stands beside ``loom.errors`` and imports no wing, so that every wing may read it (interface.md, "Configuration").
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from loom.errors import ConfigError

ENV_PREFIX: Final = "LOOM_"
CONFIG_FILE: Final = "loom.toml"
MIN_TTL_MS: Final = 200
MAX_PARTITIONS: Final = 10_000

_SECRET: Final = ("redis_url", "kafka", "sealing.kek", "registry_url")
"""Settings whose value may hold a password; it is never shown, not even where it is wrong."""


def _default_node_id() -> str:
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:40] or "node"
    return f"{host}-{secrets.token_hex(3)}"


def _split(value: Any) -> Any:
    """A comma-separated list is as good as a JSON one: that is how people write a variable."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return tuple(part.strip() for part in value.split(",") if part.strip())


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sealing(_Section):
    """How fields are sealed (system.md 2 and 3)."""

    sensitive: dict[str, tuple[str, ...]] | None = None
    """``{EVENT_TYPE: [dot.path, ...]}`` in wire names, nested paths and ``*``; added to the default."""
    keys: str | None = None
    """Where subjects' keys are: ``redis``, ``file:PATH``, ``memory``; none: nothing is sealed."""
    kek: str | None = Field(default=None, repr=False)
    """Key-encryption key: ``env:NAME`` or ``file:PATH``, base64 of 32 bytes."""
    allow_plaintext_checkpoints: bool = False
    legacy_plaintext: Literal["load", "refuse"] = "load"

    @field_validator("keys")
    @classmethod
    def _keys(cls, value: str | None) -> str | None:
        if value is not None and value not in {"redis", "memory"} and not value.startswith("file:"):
            raise ValueError("use 'redis', 'memory' or 'file:PATH'")
        return value

    @field_validator("kek")
    @classmethod
    def _kek(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("env:", "file:")):
            raise ValueError("use 'env:NAME' or 'file:PATH', never the key itself")
        return value


class Leases(_Section):
    """Evidence of life (system.md 6); ``presence_ttl_ms`` of a node defaults to ``ttl_ms``."""

    enabled: bool = True
    acquire: Literal["lazy", "eager"] = "lazy"
    lazy_grace_ms: int | None = Field(default=None, ge=0)
    """How long a fresh run drives before it takes a lease; none: a third of ``ttl_ms``."""
    ttl_ms: int = Field(default=30_000, ge=MIN_TTL_MS)
    on_store_error: Literal["stop", "continue"] = "stop"


class Access(_Section):
    """Who may act on executions (system.md 0, "Access")."""

    operators: Names = ()
    """Actors that may discard, quarantine, release, purge and delete; denied to all others, owners included."""


class Config(BaseSettings):
    """Every setting of loom; frozen.

    Raises:
        ConfigError: a value cannot work. One line names the setting, where it was read, and what would do.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        toml_file=CONFIG_FILE,
        frozen=True,
        extra="forbid",
        validate_default=False,
    )

    storage: Literal["kafka", "memory"] = "kafka"
    bootstrap: str | None = None
    """Brokers, ``host:port,host:port``."""
    kafka: dict[str, str | int | float | bool] = Field(default_factory=dict, repr=False)
    """Any librdkafka property, given to every client. In variables ``_`` stands for ``.``: ``LOOM_KAFKA__SASL_PASSWORD``."""
    redis_url: str | None = Field(default=None, repr=False)
    registry_url: str | None = Field(default=None, repr=False)
    topic_prefix: str = Field(default="loom.", max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    partitions: int = Field(default=8, ge=1, le=MAX_PARTITIONS)
    node_id: str = Field(
        default_factory=_default_node_id, min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$"
    )
    lanes: int = Field(default=2, ge=1, le=2)
    """Transactional ids that the writer of a partition uses in turn: 2 waits less for the brokers than 1."""
    data_dir: Path | None = None
    """Folder of a node's local caches; none: one under the user's cache folder."""

    sealing: Sealing = Field(default_factory=Sealing)
    leases: Leases = Field(default_factory=Leases)
    access: Access = Field(default_factory=Access)

    inbox_max_payload_bytes: int = Field(default=64 * 1024, ge=1)
    inbox_max_backlog: int = Field(default=10_000, ge=1)
    """Messages that may wait on one topic of a chain."""
    inbox_message_ttl_ms: int | None = Field(default=None, ge=1)
    """Age after which a waiting message is passed over unread; none: never."""
    inbox_trim_every: int = Field(default=64, ge=1)
    """Consumed messages of a topic after which their prefix is deleted."""
    inbox_auto_release: bool = True
    """Whether this node lifts a hold by itself once it can open the held message, or leaves that to operators."""
    quarantine_max: int = Field(default=256, ge=1, le=1024)
    """Copies of held messages that a chain may keep."""

    max_payload_bytes: int = Field(default=512 * 1024, ge=1024)
    """Largest input, step output or answer, as JSON."""
    max_resident: int = Field(default=10_000, ge=0)
    """Parked executions kept in memory; others are replayed when they wake."""
    max_recoveries: int = Field(default=20, ge=1)
    """Recoveries of one execution without progress before it is left to an operator."""
    retention_ms: int | None = Field(default=None, ge=1)
    """How long a chain is kept after its end, with all that belongs to it; none: for ever."""
    max_redrive_attempts: int = Field(default=20, ge=1)
    """Attempts, of all nodes together, to carry on what its owner could not open, before it is left to an operator."""
    recovery_interval_ms: int = Field(default=60_000, ge=50)
    """How often the open executions of owned shards are walked."""
    presence_ttl_ms: int | None = Field(default=None, ge=MIN_TTL_MS)
    journal_max_behind: int = Field(default=256, ge=1)
    """Events of one execution that may wait for the log before new effects wait too."""
    step_threads: int = Field(default=32, ge=1, le=1024)
    """Threads for steps that are ordinary functions."""
    storage_patience_ms: int = Field(default=120_000, ge=1)
    """How long a run repeats an append that does not succeed before it is given up to recovery."""
    flows: Names = ()
    """Modules with flows: what a worker runs, and what the command line checks an input against before it is sent."""
    publish_topics: Names = ()
    """Topics that ``ctx.publish`` may write."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(error, values) from None
        except SettingsError as error:
            raise _explain_source(error) from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                CONFIG_FILE, f"it is no TOML ({error})", "correct the file", str(Path.cwd())
            ) from None

    @property
    def presence_ms(self) -> int:
        """Time to live of this node's presence row, in milliseconds (clauses.md, point 6)."""
        return self.presence_ttl_ms or self.leases.ttl_ms

    @field_validator("kafka", mode="before")
    @classmethod
    def _properties(cls, value: Any) -> Any:
        return _flatten(value) if isinstance(value, dict) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, variables, file: nothing else is read."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def _flatten(given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Property names with dots, however a table or a variable had to write them."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        name = prefix + (key if "." in key else key.replace("_", "."))
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _explain(error: ValidationError, given: dict[str, Any]) -> ConfigError:
    first = error.errors(include_url=False, include_input=True)[0]
    path = [str(part) for part in first["loc"]]
    setting = ".".join(path) or "configuration"
    source = _source_of(path, given)
    if first["type"] == "extra_forbidden":
        return ConfigError(setting, "there is no such setting", "see docs/operations.md for the list", source)
    message = first["msg"].removeprefix("Value error, ")
    if setting.startswith(_SECRET) or isinstance(first.get("input"), dict | list):
        shown = "its value cannot be used"
    else:
        shown = f"{str(first.get('input'))[:80]!r} cannot be used"
    return ConfigError(setting, shown, message[:1].lower() + message[1:], source)


def _explain_source(error: SettingsError) -> ConfigError:
    # "error parsing value for field "sealing" from source "EnvSettingsSource"": the field is the only safe part.
    parts = str(error).split('"')
    setting = parts[1] if len(parts) > 1 else "configuration"
    return ConfigError(setting, "its value cannot be read", "give it as JSON", _env_name([setting]))


def _env_name(path: list[str]) -> str:
    return ENV_PREFIX + "__".join(path).upper()


def _source_of(path: list[str], given: dict[str, Any]) -> str:
    if path and path[0] in given:
        return "argument"
    names = {name.upper() for name in os.environ}
    for end in range(len(path), 0, -1):
        if _env_name(path[:end]) in names:
            return _env_name(path[:end])
    if any(name.startswith(f"{_env_name(path[:1])}__") for name in names):
        return f"{_env_name(path[:1])}__*"
    return f"./{CONFIG_FILE}" if Path(CONFIG_FILE).exists() else "default"
