"""A Slurm cluster of two nodes on this machine, without systemd: munged, slurmctld, two slurmd.

Both nodes are this machine at other ports: the cluster shows what ``srun`` and ``sbatch`` set and
send, not what a network does.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = "munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol"
PATH = f"{os.environ['PATH']}:/usr/sbin"
CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=s0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=1000
NodeName=s1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000
PartitionName=all Nodes=s0,s1 Default=YES State=UP
"""


def installed() -> bool:
    """Return whether this process can start a cluster: it needs root, Slurm and munge."""
    return os.geteuid() == 0 and all(shutil.which(each, path=PATH) for each in PROGRAMS)


def wait(what: str, until: Callable[[], bool], seconds: float) -> None:
    """Wait until a function returns True."""
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} takes more than {seconds} s")
        time.sleep(0.1)


@contextmanager
def cluster(root: Path) -> Iterator[dict[str, str]]:
    """Start a cluster with its files in ``root``; return the environment of its commands."""
    for folder in ("state", "spool.s0", "spool.s1", "munge"):
        (root / folder).mkdir(mode=0o700)
    (root / "munge" / "key").write_bytes(secrets.token_bytes(1024))
    (root / "munge" / "key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = 20000 + door.getsockname()[1] % 10000
    host = socket.gethostname().partition(".")[0]
    places = {"host": host, "root": root, "port": port, "first": port + 1, "second": port + 2}
    (root / "slurm.conf").write_text(CONFIG.format_map(places))
    environment = os.environ | {"SLURM_CONF": str(root / "slurm.conf"), "PATH": PATH}
    hosts, line = Path("/etc/hosts"), f"127.0.0.1 s0 s1 # {root.name}\n"
    daemons = []

    def start(*words: str) -> None:
        with (root / "daemons.log").open("a") as log:
            daemons.append(
                subprocess.Popen(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def are_idle() -> bool:
        nodes = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        done = subprocess.run(nodes, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() == "2"

    with hosts.open("a") as file:
        file.write(line)
    try:
        files = {"key": "munge/key", "socket": "munge.socket", "pid": "munge/pid"}
        files |= {"log": "munge/log", "seed": "munge/seed"}
        options = [f"--{n}{'-file' * (n != 'socket')}={root / f}" for n, f in files.items()]
        start("munged", "--foreground", "--force", "--num-threads=2", *options)
        wait("munged", (root / "munge.socket").exists, 10)
        start("slurmctld", "-D")
        for node in ("s0", "s1"):
            start("slurmd", "-D", "-N", node)
        wait("Slurm", are_idle, 30)
        yield environment
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
        for process in Path("/proc").glob("[0-9]*"):  # slurmstepd continues after its slurmd
            with suppress(OSError):
                of_cluster = f"SLURM_CONF={root}/".encode() in (process / "environ").read_bytes()
                if of_cluster:
                    os.kill(int(process.name), signal.SIGKILL)
        hosts.write_text(hosts.read_text().replace(line, ""))
