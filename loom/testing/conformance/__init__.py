"""One suite per store contract: a backend or wrapper subclasses it, gives the fixture ``bench`` and adds nothing else.

Suites are plain classes of coroutine tests, for pytest in asyncio's auto mode; they import no test framework.
"""
