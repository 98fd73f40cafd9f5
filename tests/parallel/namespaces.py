"""Two machines on one: network namespaces, each with an address and a host name of its own."""

import functools
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

NUMBERS = itertools.count()  # of the networks that this process has made


class Network(NamedTuple):
    """Two machines on a switch.  The defaults are this machine, twice.

    ``enter`` has the words before a command that runs on each machine; ``address`` is the address
    of the first machine; ``name`` begins the names of the namespaces.
    """

    address: str = "127.0.0.1"
    enter: tuple[list[str], list[str]] = ([], [])
    name: str = ""

    def cut(self) -> None:
        """Disconnect the second machine: its device stays up, and receives nothing more."""
        ip("-n", f"{self.name}s", "link", "set", "port1", "nomaster")


def ip(*words: str) -> str:
    """Run ``ip`` and return its output."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {shlex.join(words)}: {done.stderr}")
    return done.stdout


@contextmanager
def namespaces() -> Iterator[Network]:
    """Make two machines, 10.77.0.1 and 10.77.0.2; remove them and their processes at the end."""
    name = f"nodes{os.getpid()}-{next(NUMBERS)}-"
    try:
        _make(name)
        named = ["bash", "-c", 'hostname "$0"; exec "$@"']
        first, second = (
            ["ip", "netns", "exec", f"{name}{n}", "unshare", "--uts", *named, f"node{n}"]
            for n in range(2)
        )
        yield Network("10.77.0.1", (first, second), name)
    finally:
        for space in (f"{name}{each}" for each in "01s"):
            subprocess.run(
                f"kill -9 $(ip netns pids {space}); ip netns del {space}",
                shell=True, capture_output=True, check=False,
            )  # fmt: skip


def _make(name: str) -> None:
    """Make the namespaces of both machines, and of the switch between them."""
    ip("netns", "add", f"{name}s")
    switch = "-n", f"{name}s", "link"
    ip(*switch, "add", "switch0", "type", "bridge")
    ip(*switch, "set", "switch0", "up")
    for n in range(2):
        ip("netns", "add", f"{name}{n}")
        node = "-n", f"{name}{n}"
        port = "name", f"port{n}", "netns", f"{name}s"
        ip("link", "add", "eth0", "netns", f"{name}{n}", "type", "veth", "peer", *port)
        ip(*switch, "set", f"port{n}", "master", "switch0", "up")
        ip(*node, "address", "add", f"10.77.0.{n + 1}/24", "dev", "eth0")
        ip(*node, "link", "set", "lo", "up")
        ip(*node, "link", "set", "eth0", "up")
    for n in range(2):  # a device runs up to a second after it is up
        end = time.monotonic() + 10
        while " UP " not in ip("-n", f"{name}{n}", "-br", "link", "show", "eth0"):
            if time.monotonic() > end:
                raise OSError(f"eth0 of node {n} does not run")
            time.sleep(0.05)


@functools.cache
def allowed() -> bool:
    """Return whether this process may make namespaces: it needs root, iproute2 and util-linux."""
    programs = shutil.which("ip"), shutil.which("unshare")
    if sys.platform != "linux" or os.geteuid() or None in programs:
        return False
    try:
        with namespaces() as network:
            words = [*network.enter[1], "hostname"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            return done.stdout == "node1\n"
    except OSError:
        return False
