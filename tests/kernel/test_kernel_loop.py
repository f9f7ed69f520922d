import asyncio
import contextvars
import sys

import pytest
from kernel_support import Driver, machine

from loom.errors import NotDeterministicError
from loom.kernel import Complete, Wait, flow


def work(x):
    return x


def outcome(fn, **kwargs):
    """Run a flow body that needs nothing from outside; return what it returns."""
    (end,) = machine(flow("body")(fn), **kwargs).start()
    assert isinstance(end, Complete), end
    return end.output


def test_the_usual_primitives_work():
    async def body(ctx):
        seen = []
        event, lock, queue, semaphore = asyncio.Event(), asyncio.Lock(), asyncio.Queue(), asyncio.Semaphore(1)
        condition = asyncio.Condition()

        async def producer():
            for n in range(3):
                await queue.put(n)
            async with lock, semaphore:
                event.set()
            async with condition:
                condition.notify_all()

        async def consumer():
            await event.wait()
            return [await queue.get() for _ in range(3)]

        async def waiter():
            async with condition:
                await condition.wait()
            return "notified"

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(waiter()),
                group.create_task(consumer()),
                group.create_task(producer()),
            ]
        seen.append([t.result() for t in tasks])
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(0, n)) for n in range(3)], return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.gather(*pending)
        seen.append(sorted(t.result() for t in done | pending))
        seen.append(await asyncio.wait_for(asyncio.sleep(0, "in time"), 5))
        seen.append(await asyncio.shield(asyncio.create_task(asyncio.sleep(0, "shielded"))))
        seen.append(
            [await f for f in asyncio.as_completed([asyncio.create_task(asyncio.sleep(0, n)) for n in "ab"])]
        )
        async with asyncio.timeout(3):
            await asyncio.sleep(0)
        return seen

    seen = outcome(body)
    assert seen[0] == ["notified", [0, 1, 2], None]
    assert seen[1:4] == [[0, 1, 2], "in time", "shielded"]
    assert sorted(seen[4]) == ["a", "b"]


def test_sleep_is_a_durable_timer():
    @flow("sleeper")
    async def sleeper(ctx):
        await asyncio.sleep(5)
        await asyncio.sleep(0.25)
        return ctx.logical_time.isoformat()

    d = Driver(sleeper)
    (wait,) = d.pending.values()
    assert isinstance(wait, Wait)
    assert [(a.kind, a.wake_at - d.machine.info.started_at) for a in wait.arms] == [("timer", 5000)]
    d.answer("0:0")
    (wait,) = d.pending.values()
    assert wait.arms[0].wake_at == d.machine.logical_ms + 250
    d.answer("0:1")
    assert isinstance(d.end, Complete)


def test_a_timeout_fires_and_the_step_is_abandoned():
    @flow("times_out")
    async def times_out(ctx):
        try:
            await asyncio.wait_for(ctx.run(work, 1), 2)
        except TimeoutError:
            return "late"

    d = Driver(times_out)
    timer_site = next(s for s, c in d.pending.items() if isinstance(c, Wait))
    d.answer(timer_site)
    assert d.end == Complete("late")


def test_a_timeout_that_is_not_needed_is_abandoned():
    @flow("in_time")
    async def in_time(ctx):
        async with asyncio.timeout(60):
            await ctx.run(work, 1)
        await ctx.run(work, 2)

    d = Driver(in_time)
    assert len(d.pending) == 2
    d.answer(next(s for s, c in d.pending.items() if not isinstance(c, Wait)))
    assert [type(c).__name__ for c in d.pending.values()] == ["RunStep"]


def test_timers_of_the_past_fire_at_once():
    async def body(ctx):
        loop = asyncio.get_running_loop()
        fired = []
        loop.call_at(loop.time() - 1, fired.append, "past")
        cancelled = loop.call_later(0, fired.append, "cancelled")
        cancelled.cancel()
        assert cancelled.cancelled()
        soon = loop.call_soon(fired.append, "soon")
        dropped = loop.call_soon(fired.append, "dropped")
        dropped.cancel()
        assert dropped.cancelled()
        assert not soon.cancelled()
        assert "flow handle" in repr(soon)
        await asyncio.sleep(0)
        return fired

    assert outcome(body) == ["past", "soon"]


def test_a_callback_has_a_scope_of_its_own():
    @flow("callbacks")
    async def callbacks(ctx):
        drawn = []
        asyncio.get_running_loop().call_soon(lambda: drawn.append(ctx.random()))
        await asyncio.sleep(0)
        ctx.random()

    d = Driver(callbacks)
    assert [e.data["siteId"] for e in d.history[1:]] == ["c:0", "0:0"]


def test_a_failing_callback_is_reported_not_fatal():
    async def body(ctx):
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        return 1

    m = machine(flow("body")(body))
    assert m.start() == [Complete(1)]
    assert m.complaints == ("a callback of the flow failed: ZeroDivisionError",)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda _loop: asyncio.to_thread(print),
        lambda _loop: asyncio.open_connection("localhost", 1),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda _loop: asyncio.create_subprocess_exec("true"),
        lambda loop: loop.sock_connect(None, None),
        lambda loop: loop.add_signal_handler(2, print),
        lambda loop: loop.call_soon_threadsafe(print),
        lambda loop: loop.run_forever(),
        lambda loop: loop.set_task_factory(None),
    ],
)
def test_reaching_outside_is_refused_by_name_of_the_remedy(attempt):
    async def body(ctx):
        try:
            result = attempt(asyncio.get_running_loop())
            if asyncio.iscoroutine(result):
                await result
        except NotDeterministicError as error:
            return str(error)

    assert "do it in a step with ctx.run" in outcome(body)


def test_every_method_of_a_loop_is_ours_or_refused():
    from loom.kernel.loop import FlowLoop

    base = {n for n in vars(asyncio.AbstractEventLoop) if not n.startswith("__")}
    ours = {
        n for cls in FlowLoop.__mro__ if cls not in (asyncio.AbstractEventLoop, object) for n in vars(cls)
    }
    assert base <= ours, base - ours


def test_awaiting_another_loops_future_is_refused():
    async def main():
        foreign = asyncio.get_running_loop().create_future()

        async def body(ctx):
            try:
                await foreign
            except NotDeterministicError as error:
                return str(error)

        m = machine(flow("body")(body))
        (end,) = m.start()
        foreign.cancel()
        return end.output

    assert "ctx.run" in asyncio.run(main())


def test_gathering_another_loops_future_is_refused():
    async def main():
        foreign = asyncio.get_running_loop().create_future()

        async def body(ctx):
            try:
                await asyncio.gather(foreign)
            except NotDeterministicError:
                return "refused"

        (end,) = machine(flow("body")(body)).start()
        foreign.cancel()
        return end.output

    assert asyncio.run(main()) == "refused"


def test_as_completed_over_coroutines_is_refused(recwarn):
    async def body(ctx):
        try:
            for future in asyncio.as_completed([asyncio.sleep(0, n) for n in range(3)]):
                await future
        except NotDeterministicError as error:
            return str(error)

    assert "as_completed" in outcome(body)


def test_the_outer_loop_is_left_as_it_was():
    async def main():
        outer, task = asyncio.get_running_loop(), asyncio.current_task()
        hooks = sys.get_asyncgen_hooks()
        inside = []

        async def body(ctx):
            inside.append((asyncio.get_running_loop(), asyncio.current_task()))
            await asyncio.sleep(0)
            inside.append((asyncio.get_running_loop(), asyncio.current_task()))
            return 1

        m = machine(flow("body")(body))
        m.start()
        assert asyncio.get_running_loop() is outer
        assert asyncio.current_task() is task
        assert sys.get_asyncgen_hooks() == hooks
        assert {loop for loop, _ in inside} == {m.loop}
        assert len({id(t) for _, t in inside}) == 1
        assert inside[0][1] is not task
        assert len(asyncio.all_tasks()) == 1
        await asyncio.sleep(0)  # the outer loop still works

    asyncio.run(main())


def test_flows_run_without_an_outer_loop():
    async def body(ctx):
        return [x async for x in numbers()]

    async def numbers():
        for n in range(3):
            await asyncio.sleep(0)
            yield n

    assert outcome(body) == [0, 1, 2]


def test_an_async_generator_left_behind_never_reaches_the_outer_loop():
    log = []

    async def numbers():
        try:
            while True:
                yield 1
        finally:
            log.append(asyncio.get_running_loop())

    async def body(ctx):
        async for _ in numbers():
            break
        return 1

    async def main():
        machine(flow("body")(body)).start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() not in log

    asyncio.run(main())


def test_tasks_and_futures_hash_by_order_and_sets_iterate_alike():
    async def body(ctx):
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(asyncio.sleep(0, n)) for n in range(20)]
        futures = [loop.create_future() for _ in range(20)]
        hashes = [hash(x) for x in tasks + futures]
        await asyncio.gather(*tasks)
        return [hashes == sorted(set(hashes)), [t.result() for t in set(tasks)]]

    ordered, results = outcome(body)
    assert ordered
    assert outcome(body) == [ordered, results]
    assert sorted(results) == list(range(20))


def test_context_variables_follow_tasks():
    var = contextvars.ContextVar("var", default="none")

    @flow("vars")
    async def variables(ctx):
        var.set("root")

        async def child():
            var.set("child")
            await ctx.run(work, 1)
            return var.get()

        inner = await asyncio.create_task(child())
        return [inner, var.get()]

    d = Driver(variables)
    d.answer("0.0:0")
    assert d.end == Complete(["child", "root"])
    assert var.get() == "none"


def test_a_named_task_keeps_its_scope():
    async def body(ctx):
        async def who():
            return asyncio.current_task().get_name()

        return [await asyncio.create_task(who(), name="mine"), await asyncio.create_task(who())]

    assert outcome(body) == ["mine", "0.1"]


def test_many_tasks_do_not_pile_up():
    async def body(ctx):
        for _ in range(500):
            await asyncio.create_task(asyncio.sleep(0))
        return len(asyncio.get_running_loop()._tasks)

    assert outcome(body) <= 130


def test_nested_machines_do_not_mix():
    async def inner(ctx):
        await asyncio.sleep(0)
        return "inner"

    async def body(ctx):
        (end,) = machine(flow("inner")(inner)).start()
        await asyncio.sleep(0)
        return [end.output, asyncio.current_task().get_name()]

    assert outcome(body) == ["inner", "0"]


def test_wait_for_numbers_alike_in_every_python():
    """3.11 runs what is waited for in a task of its own, later versions do not."""

    async def waits(ctx):
        async def inner():
            await ctx.run(work, 1)
            await asyncio.gather(ctx.run(work, 2), ctx.run(work, 3))

        await asyncio.wait_for(inner(), 5)
        await ctx.run(work, 4)

    d = Driver(flow("waits")(waits))
    seen = []
    while d.end is None:
        site = next(s for s, c in d.pending.items() if not isinstance(c, Wait))
        seen.append(site)
        d.answer(site)
    assert seen == ["0:1", "0.0:0", "0.1:0", "0:2"]


def test_a_context_in_a_step_on_another_thread_is_refused():
    from concurrent.futures import ThreadPoolExecutor

    refused = []

    async def body(ctx):
        with ThreadPoolExecutor(1) as pool:  # what a careless flow might do
            refused.append(pool.submit(lambda: type(_error(ctx.now)).__name__).result())
        return 1

    def _error(call):
        try:
            call()
        except NotDeterministicError as error:
            return error

    outcome(body)
    assert refused == ["NotDeterministicError"]
