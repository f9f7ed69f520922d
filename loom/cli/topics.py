"""The catalogue against the cluster: ``loom topics plan | apply | check | export``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.common import AsJson, DryRun, emit, require

if TYPE_CHECKING:
    from rich.console import Console

    from loom.config import Config
    from loom.schemas.registry import SchemaRegistry
    from loom.topics.catalogue import Catalogue
    from loom.topics.cluster import Cluster
    from loom.topics.plan import Change, Plan

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

Bootstrap = Annotated[
    str | None, typer.Option("--bootstrap", metavar="HOST:PORT", help="Brokers; else the setting.")
]
Prefix = Annotated[str | None, typer.Option("--prefix", help="Topic prefix; else the setting.")]
Partitions = Annotated[
    int | None, typer.Option("--partitions", help="Partitions of every topic; else the setting.")
]


class Format(StrEnum):
    """What ``export`` can write."""

    STRIMZI = "strimzi"
    JSON = "json"


@app.command("plan")
def show_plan(
    bootstrap: Bootstrap = None, prefix: Prefix = None, partitions: Partitions = None, as_json: AsJson = False
) -> None:
    """Show every difference between cluster and catalogue; change nothing.

    Example: loom topics plan --bootstrap localhost:9092
    """
    from loom.topics import provisioning

    cluster, catalogue, registry = _parts(bootstrap, prefix, partitions)
    found = provisioning.plan(cluster, catalogue, registry)
    emit(found.to_json(), as_json=as_json, human=lambda console: _print_plan(console, found))


@app.command("apply")
def apply_plan(
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    partitions: Partitions = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make the differences disappear that `plan` shows, and nothing else; safe to repeat.

    Example: loom topics apply --bootstrap localhost:9092
    """
    from loom.topics import provisioning

    cluster, catalogue, registry = _parts(bootstrap, prefix, partitions)
    found = provisioning.plan(cluster, catalogue, registry)
    done: list[Change] = []
    if not dry_run:
        provisioning.apply(cluster, found, registry, done.append)

    def human(console: Console) -> None:
        if dry_run:
            _print_plan(console, found)
        for change in done:
            console.print(f"done: {_brief(change)}", markup=False)
        if not dry_run:
            console.print(f"the topics of {catalogue.prefix} are as the catalogue says", markup=False)

    emit({**found.to_json(), "applied": len(done)}, as_json=as_json, human=human)


@app.command("check")
def check_topics(
    bootstrap: Bootstrap = None, prefix: Prefix = None, partitions: Partitions = None, as_json: AsJson = False
) -> None:
    """Check that a node can run on the topics; status 2 names everything that keeps it from running.

    Example: loom topics check --prefix loom.
    """
    from loom.topics import provisioning

    cluster, catalogue, _ = _parts(bootstrap, prefix, partitions)
    remarks = provisioning.check(cluster, catalogue)

    def human(console: Console) -> None:
        for remark in remarks:
            console.print(f"remark: {remark}", markup=False)
        count = len(catalogue.topics())
        console.print(
            f"{count} topics of {catalogue.prefix}, {catalogue.partitions} partitions each: fit to run on",
            markup=False,
        )

    emit({"prefix": catalogue.prefix, "fit": True, "remarks": list(remarks)}, as_json=as_json, human=human)


@app.command("export")
def export_catalogue(
    as_format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.STRIMZI,
    kafka_cluster: Annotated[str, typer.Option("--cluster", help="Name of the Kafka resource.")] = "kafka",
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas of every topic.", min=1)] = 3,
    prefix: Prefix = None,
    partitions: Partitions = None,
) -> None:
    """Write the catalogue for other tools, without asking a cluster: topics, and what each role may do.

    Example: loom topics export --format strimzi --cluster my-cluster > topics.yaml
    """
    from dataclasses import replace

    from loom.topics.strimzi import strimzi

    catalogue = replace(_catalogue(_config(topic_prefix=prefix, partitions=partitions)), replicas=replicas)
    if as_format is Format.STRIMZI:
        typer.echo(strimzi(catalogue, cluster=kafka_cluster), nl=False)
    else:
        emit(_catalogue_json(catalogue), as_json=True, human=lambda _: None)


def _parts(
    bootstrap: str | None, prefix: str | None, partitions: int | None
) -> tuple[Cluster, Catalogue, SchemaRegistry | None]:
    from loom.schemas.registry import SchemaRegistry
    from loom.topics.cluster import Cluster

    config = _config(bootstrap=bootstrap, topic_prefix=prefix, partitions=partitions)
    address = require("bootstrap", config.bootstrap, "give --bootstrap HOST:PORT, or set LOOM_BOOTSTRAP")
    registry = SchemaRegistry(config.registry_url) if config.registry_url else None
    return Cluster(address, config.kafka), _catalogue(config), registry


def _config(**overrides: Any) -> Config:
    """Settings, without the rest of loom: these commands need neither stores nor flows."""
    from loom.config import Config

    return Config(**{name: value for name, value in overrides.items() if value is not None})


def _catalogue(config: Config) -> Catalogue:
    from loom.topics.catalogue import Catalogue

    return Catalogue(config.topic_prefix, config.partitions)


def _print_plan(console: Console, found: Plan) -> None:
    from loom.topics import provisioning

    for change in found.changes:
        console.print(f"change: {change}", markup=False)
    if found.refusals:
        console.print(f"refused: {provisioning.refused(found)}", markup=False)
    for remark in found.remarks:
        console.print(f"remark: {remark}", markup=False)
    if found.is_empty:
        console.print(
            f"nothing to change: the topics of {found.prefix} are as the catalogue says", markup=False
        )


def _brief(change: Change) -> str:
    """A created topic without its settings: the plan showed them."""
    from loom.topics.plan import CreateTopic

    return f"create topic {change.topic.name}" if isinstance(change, CreateTopic) else str(change)


def _catalogue_json(catalogue: Catalogue) -> dict[str, Any]:
    from loom.topics.access import acls

    return {
        "prefix": catalogue.prefix,
        "topics": [
            {"name": t.name, "partitions": t.partitions, "replicas": t.replicas, "settings": dict(t.settings)}
            for t in catalogue.topics()
        ],
        "acls": [
            {
                "role": a.role,
                "resource": a.resource,
                "name": a.name,
                "pattern": a.pattern,
                "operations": a.operations,
            }
            for a in acls(catalogue)
        ],
        "subjects": catalogue.subjects(),
        "transactional_ids": {
            "log": [catalogue.log_transactional_id(p) for p in range(catalogue.partitions)],
            "fold": [catalogue.fold_transactional_id(p) for p in range(catalogue.partitions)],
        },
    }
