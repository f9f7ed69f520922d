"""The command that looks for what is wrong: topics, Redis, sealing, the fleet."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from loom.cli.common import AsJson, emit, load_config

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from loom import Config
    from loom.stores.findings import Finding

STATUS: Final = {"info": 0, "warning": 1, "error": 2}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(as_json: AsJson = False) -> int:
    """Look at topics, Redis, sealing and the fleet, and say what is wrong and what would do.

    Ends with 0 where nothing is, 1 on warnings, 2 on errors.

    Example: loom doctor
    """
    config = load_config()
    found = _topics(config)
    found += asyncio.run(_fleet(config))
    found.sort(key=lambda finding: -STATUS[finding.severity])

    def human(console: Console) -> None:
        if not found:
            console.print("nothing found")
            return
        for finding in found:
            console.print(f"{finding.severity}: {finding.problem}", markup=False)
            console.print(f"    {finding.remedy} ({finding.code})", markup=False)

    emit([asdict(finding) for finding in found], as_json=as_json, human=human)
    return max((STATUS[finding.severity] for finding in found), default=0)


def _topics(config: Config) -> list[Finding]:
    from loom.cli.common import require
    from loom.errors import TopicsError
    from loom.stores.findings import Finding
    from loom.topics import provisioning
    from loom.topics.catalogue import Catalogue
    from loom.topics.cluster import Cluster

    if config.storage != "kafka":
        return []
    address = require("bootstrap", config.bootstrap, "set LOOM_BOOTSTRAP")
    catalogue = Catalogue(config.topic_prefix, config.partitions)
    try:
        remarks = provisioning.check(Cluster(address, config.kafka), catalogue)
    except TopicsError as unfit:
        return [Finding("topics-unfit", "error", "; ".join(unfit.problems[:8]), unfit.remedy)]
    return [Finding("topics-differ", "info", remark, "see `loom topics plan`") for remark in remarks]


async def _fleet(config: Config) -> list[Finding]:
    from loom import Client
    from loom.errors import TopicsError
    from loom.stores.redis.connection import RedisConnection
    from loom.stores.redis.doctor import examine

    found: list[Finding] = []
    if config.redis_url:
        connection = RedisConnection(config.redis_url, config.topic_prefix)
        try:
            found += await examine(connection)
        finally:
            await connection.close()
    # The doctor says what a node would refuse to start with.
    lenient = config.sealing.model_copy(update={"allow_plaintext_checkpoints": True})
    try:
        async with Client(config.model_copy(update={"sealing": lenient})) as client:
            found += await client.findings()
    except TopicsError:
        pass  # said already
    return found
