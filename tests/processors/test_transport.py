"""Faust's transport as loom changes it, on a real broker (kafka.md "Processors", transport)."""

import faust
import pytest
from kafka_bench import until

from loom.errors import ConfigError
from loom.processors import transport
from loom.processors.transport import CommittedApp, check_faust


def _app(bench, **more):
    settings = {
        "broker": f"kafka://{bench.bootstrap}",
        "store": "memory://",
        "web_enabled": False,
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "stream_wait_empty": False,
        "autodiscover": False,
        "broker_commit_interval": 0.2,
        "broker_session_timeout": 10,
        "origin": "tests",
        **more,
    }
    return CommittedApp(bench.catalogue.prefix + "app", **settings)


def _agent(app, topic, seen):
    channel = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    @app.agent(channel, name="agent")
    async def agent(stream):
        async for event in stream.noack().events():
            seen.append(event.message)
            event.ack()


def _transaction(producer, topic, values, *, commit=True):
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, b"k", partition=0)
    if commit:
        producer.commit_transaction(30)
    else:
        producer.flush(30)  # the records are in the log before they are void
        producer.abort_transaction(30)


async def test_an_agent_sees_no_aborted_record_and_keeps_headers(bench):
    bench.make("source")
    topic = bench.catalogue.prefix + "source"
    app, seen = _app(bench), []
    _agent(app, topic, seen)
    producer = bench.producer("writer")
    _transaction(producer, topic, [b"void"] * 10, commit=False)
    await app.start()
    try:
        _transaction(producer, topic, [b"void"] * 10, commit=False)
        bench.send(topic, 0, (b"k", b"good", [("type", b"T")]))
        await until(lambda: seen, "a committed record")
        assert [(message.value, tuple(message.headers)) for message in seen] == [(b"good", (("type", b"T"),))]
    finally:
        await app.stop()
    assert len(bench.read_all(topic, committed=False)) == 21


async def test_commits_pass_every_hole_and_memory_stays_flat(bench):
    bench.make("source")
    topic = bench.catalogue.prefix + "source"
    producer = bench.producer("writer")
    _transaction(producer, topic, [b"0"])  # offset 0, then a control record: the hole right after offset 0
    app, seen = _app(bench), []
    _agent(app, topic, seen)
    await app.start()
    try:
        await until(lambda: len(seen) == 1, "the record at offset 0")
        for number in range(50):
            _transaction(producer, topic, [b"void"] * 20, commit=False)
            _transaction(producer, topic, [b"%d" % number] * 200)
        await until(lambda: len(seen) == 10_001, "10,001 committed records")
        consumer, last = app.consumer, seen[-1].offset + 1
        await until(lambda: bench.committed(app.conf.id, topic, 0) == last, f"the commit of {last}")
        assert consumer.at_work() == 0
        assert sum(map(len, consumer._acked.values())) == 0
        assert sum(map(len, consumer._acked_index.values())) == 0
        assert sum(map(len, consumer._gap.values())) == 0
        assert len(consumer._unacked_messages) == 0
    finally:
        await app.stop()
    assert b"void" not in {message.value for message in seen}


async def test_no_commit_passes_a_record_at_work_and_it_comes_again(bench):
    bench.make("source")
    topic = bench.catalogue.prefix + "source"
    producer = bench.producer("writer")
    for number in range(6):  # a control record after each: every record stands behind a hole
        _transaction(producer, topic, [b"%d" % number])
    held = []
    app = _app(bench)
    channel = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    @app.agent(channel, name="agent")
    async def agent(stream):
        async for event in stream.noack().events():
            if event.value == b"2":
                held.append(event)
            else:
                event.ack()

    await app.start()
    try:
        await until(
            lambda: bench.committed(app.conf.id, topic, 0) == 3, "the commit in front of the held record"
        )
        await until(lambda: app.consumer._n_acked == 5, "the records behind it")
        await app.consumer.commit()
        assert bench.committed(app.conf.id, topic, 0) == 3
    finally:
        await app.stop()
    assert bench.committed(app.conf.id, topic, 0) == 3
    again, seen = _app(bench), []
    _agent(again, topic, seen)
    await again.start()
    try:
        await until(lambda: len(seen) == 4, "the held record and those behind it")
        assert [message.value for message in seen] == [b"2", b"3", b"4", b"5"]
        await until(lambda: bench.committed(app.conf.id, topic, 0) == 11, "the commit of the last")
    finally:
        await again.stop()


async def test_tables_are_recovered_and_hold_committed_data_only(bench):
    bench.make("source")
    topic = bench.catalogue.prefix + "source"
    producer = bench.producer("writer")

    def counting():
        app = _app(bench, topic_allow_declare=True)
        table = app.Table("counts", default=int, partitions=2, key_type=str, value_type=int)
        channel = app.topic(
            topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
        )

        @app.agent(channel, name="agent")
        async def agent(stream):
            async for event in stream.events():
                table[event.value.decode()] += 1

        return app, table

    app, table = counting()
    await app.start()
    try:
        _transaction(producer, topic, [b"void"] * 10, commit=False)
        _transaction(producer, topic, [b"a", b"b", b"a"])
        await until(lambda: sum(table.values()) == 3, "three counted records")
    finally:
        await app.stop()
    app, table = counting()
    await app.start()  # returns once tables are recovered
    try:
        _transaction(producer, topic, [b"c"])
        await until(lambda: "c" in table, "a record after the recovery")
        assert dict(table.items()) == {"a": 2, "b": 1, "c": 1}
    finally:
        await app.stop()


def test_the_installed_faust_fits():
    check_faust()


@pytest.mark.parametrize("version", ["0.14.9", "0.16.0", "1.0"])
def test_another_faust_is_refused_at_start(monkeypatch, version):
    monkeypatch.setattr(faust, "__version__", version)
    with pytest.raises(ConfigError, match=r"install faust-streaming 0\.15\."):
        check_faust()


def test_a_faust_that_calls_another_name_is_refused(monkeypatch):
    async def drain(self):
        return self.getmany(), self._read_offset

    monkeypatch.setattr(transport, "_USES", ((drain, ("getmany", "_read_offset", "_add_gap")),))
    with pytest.raises(ConfigError, match="no longer uses _add_gap"):
        check_faust()


def test_a_faust_that_takes_other_parameters_is_refused(monkeypatch):
    monkeypatch.setattr(transport, "_TOUCHED", ((lambda self, partition: None, ("self", "tp")),))
    with pytest.raises(ConfigError, match="takes other parameters"):
        check_faust()
