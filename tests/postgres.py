"""A real PostgreSQL server on loopback, in a data directory that is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path("/usr/lib/postgresql")
"""Where Debian's packages put the programs, one folder for each version."""


class Server:
    """One server; `restart` ends all connections on the way."""

    def __init__(self, programs: Path, data: Path, port: int) -> None:
        self._programs, self._data, self._port = programs, data, port
        self.run("initdb", "--auth=trust", "--username=tilegen", "--no-sync", "-D", str(data))
        self._options = (
            f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={data} "
            "-c fsync=off -c max_connections=200"
        )
        self.start()

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs, which refuse to be run by root."""
        command = [str(self._programs / program), *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        # Not a pipe: the server would keep it open.
        with tempfile.TemporaryFile() as said, contextlib.chdir("/"):
            code = subprocess.call(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
            said.seek(0)
            assert code == 0, f"{program}: {said.read().decode()}"

    def start(self) -> None:
        log = str(self._data / "log")
        self.run("pg_ctl", "-D", str(self._data), "-l", log, "-w", "-o", self._options, "start")

    def stop(self) -> None:
        """Stop at once, as a crash would."""
        self.run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def signal(self, number: signal.Signals) -> None:
        """Signal all processes of the server: SIGSTOP freezes it, SIGCONT lets it go on."""
        first = (self._data / "postmaster.pid").read_text().split()[0]
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for process in (first, *children):
            os.kill(int(process), number)

    def database(self, name: str) -> str:
        """Make a database and return its URL."""
        self.run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", "tilegen", name)
        return f"postgresql://tilegen@127.0.0.1:{self._port}/{name}"


@contextlib.contextmanager
def postgres() -> Iterator[Server]:
    """Start a server, or skip the test with the missing program's name."""
    results = sorted(PACKAGES.glob("*/bin/postgres"))
    if not results:
        pytest.skip("needs Debian's package postgresql: apt-get install -y postgresql")
    pytest.importorskip("psycopg", reason="needs psycopg; pip install 'tilegen[dev]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    data = Path(tempfile.mkdtemp(prefix="tilegen-postgres-"))
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(data, user.pw_uid, user.pw_gid)
    try:
        server = Server(results[-1].parent, data, port)
        try:
            yield server
        finally:
            with contextlib.suppress(AssertionError):  # of a test that has left it stopped
                server.stop()
    finally:
        shutil.rmtree(data, ignore_errors=True)
