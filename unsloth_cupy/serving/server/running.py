"""The process of a server: its socket, and how it ends."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from ...errors import ConfigError
from .app import Server

READERS = 5  # seconds for clients that have not read their answers when the last answer has ended


def is_local(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; raise ConfigError if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        problem = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise ConfigError(f"serve: {problem}; choose another --port or --host") from None


class Listening(uvicorn.Server):
    """A server that answers open requests after SIGTERM or Ctrl-C, and refuses new ones.

    A second signal ends it at once.
    """

    def __init__(self, server: Server, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            server.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=READERS
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancel)
        self.own, self.ready = server, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then call ``ready``."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Refuse new requests; at a second signal, end now."""
        if self.own.ending:
            self.should_exit = self.force_exit = True
        self.own.ending = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end: after the last answer."""
        ended = await super().on_tick(counter)
        return ended or (self.own.ending and not self.own.computes)


def _is_no_cancel(record: logging.LogRecord) -> bool:
    """Return whether a message is none of a request that the end of the server cut."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


def serve(server: Server, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C; call ``ready`` once requests are answered."""
    server.worker.start()
    try:
        Listening(server, ready).run(sockets=[listener])
    finally:
        server.worker.stop()
