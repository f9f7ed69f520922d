"""What a flow's event loop refuses: everything that would reach outside of it."""

from __future__ import annotations

import asyncio
from typing import Any

from loom.errors import NotDeterministicError


def _refused(what: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotDeterministicError(f"loop.{what}")

    return refuse


class RefusingLoop(asyncio.AbstractEventLoop):
    """An event loop that has no I/O, no threads, no signals, no processes: each asks for ``ctx.run`` by its error."""

    add_reader: Any = _refused("add_reader")
    add_signal_handler: Any = _refused("add_signal_handler")
    add_writer: Any = _refused("add_writer")
    call_soon_threadsafe: Any = _refused("call_soon_threadsafe")
    connect_accepted_socket: Any = _refused("connect_accepted_socket")
    connect_read_pipe: Any = _refused("connect_read_pipe")
    connect_write_pipe: Any = _refused("connect_write_pipe")
    create_connection: Any = _refused("create_connection")
    create_datagram_endpoint: Any = _refused("create_datagram_endpoint")
    create_server: Any = _refused("create_server")
    create_unix_connection: Any = _refused("create_unix_connection")
    create_unix_server: Any = _refused("create_unix_server")
    getaddrinfo: Any = _refused("getaddrinfo")
    getnameinfo: Any = _refused("getnameinfo")
    remove_reader: Any = _refused("remove_reader")
    remove_signal_handler: Any = _refused("remove_signal_handler")
    remove_writer: Any = _refused("remove_writer")
    run_forever: Any = _refused("run_forever")
    run_in_executor: Any = _refused("run_in_executor")
    run_until_complete: Any = _refused("run_until_complete")
    sendfile: Any = _refused("sendfile")
    set_default_executor: Any = _refused("set_default_executor")
    set_exception_handler: Any = _refused("set_exception_handler")
    set_task_factory: Any = _refused("set_task_factory")
    shutdown_asyncgens: Any = _refused("shutdown_asyncgens")
    shutdown_default_executor: Any = _refused("shutdown_default_executor")
    sock_accept: Any = _refused("sock_accept")
    sock_connect: Any = _refused("sock_connect")
    sock_recv: Any = _refused("sock_recv")
    sock_recv_into: Any = _refused("sock_recv_into")
    sock_recvfrom: Any = _refused("sock_recvfrom")
    sock_recvfrom_into: Any = _refused("sock_recvfrom_into")
    sock_sendall: Any = _refused("sock_sendall")
    sock_sendfile: Any = _refused("sock_sendfile")
    sock_sendto: Any = _refused("sock_sendto")
    start_tls: Any = _refused("start_tls")
    stop: Any = _refused("stop")
    subprocess_exec: Any = _refused("subprocess_exec")
    subprocess_shell: Any = _refused("subprocess_shell")
