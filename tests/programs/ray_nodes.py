"""A Ray cluster on loopback: nodes by `ray start`, each a group of processes that a test may end.

It has a home, a temporary folder, ports and a token of its own. Without Ray its tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs ray; pip install 'tilegen[ray]'"
)
ROOT = Path(__file__).parents[2]
SCRIPT = "from ray.scripts.scripts import main; main()"
TILEGEN = "from tilegen.cli.main import main; main()"
UP = "Ray runtime started"


class Nodes:
    """The nodes of a cluster, the head first, by the number in which they were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Short, since the names of Ray's sockets are limited.
        self._short = tempfile.TemporaryDirectory(
            prefix="tg", dir="/tmp", ignore_cleanup_errors=True
        )
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HOME": self._short.name,
            "RAY_TMPDIR": self._short.name,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TILEGEN_CPU": "kernels",
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)  # it would limit simulated GPUs
        self.address = f"127.0.0.1:{free_port()}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._drivers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for driver in self._drivers:
            with contextlib.suppress(ProcessLookupError):
                driver.kill()
        for number in range(len(self._nodes)):
            self.end(number)
        self._short.cleanup()

    def start(self, cpus: int, gpus: int = 0, *, cache: Path | None = None, **device: int) -> int:
        """Start a node and return its number. `device` names the recordings that its GPUs have."""
        number = len(self._nodes)
        own = cache or self.folder / f"node-{number}"
        port = self.address.partition(":")[2]
        where = ["--head", f"--port={port}", "--include-dashboard=false"]
        if find_spec("grpc"):  # without it Ray has no server for clients, which needs a port
            where.append(f"--ray-client-server-port={free_port()}")
        where = where if number == 0 else [f"--address={self.address}"]
        options = [
            *where,
            "--node-ip-address=127.0.0.1",
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
            f"--resources={json.dumps(device)}",
            f"--object-store-memory={80 * 2**20}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--metrics-export-port={free_port()}",
            "--block",
        ]
        log = self.folder / f"node-{number}.log"
        with log.open("wb") as file:
            self._nodes.append(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, "start", *options],
                    env={**self.environment, "TILEGEN_CACHE_DIR": str(own)},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + 120
        while UP not in log.read_text(encoding="utf-8", errors="replace"):
            assert self._nodes[-1].poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        return number

    def end(self, number: int) -> None:
        """End all processes of a node at once, as a power cut does."""
        node = self._nodes[number]
        for process in [node.pid, *self._below(number)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()

    def workers(self, number: int) -> list[int]:
        """Return the processes of a node that measure."""
        return [
            one for one, name in self._below(number).items() if name.startswith(b"ray::measure")
        ]

    def _below(self, number: int) -> dict[int, bytes]:
        """Return all processes that a node has started, with their names."""
        parents: dict[int, int] = {}
        names: dict[int, bytes] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[pid] = (entry / "cmdline").read_bytes()
        family = {self._nodes[number].pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return {
            pid: names[pid] for pid in family if pid in names and pid != self._nodes[number].pid
        }

    def drive(self, *words: str, grace: float = 60.0, cache: str = "driver") -> Driver:
        """Start `tilegen tune --ray` with a cache of its own."""
        code = f"""
import signal
import tilegen.tuning.on_ray as on_ray
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
on_ray.GRACE_SECONDS = {grace}
{TILEGEN}"""
        command = [sys.executable, "-c", code, "--verbose", "tune", "--ray", self.address, *words]
        log = self.folder / f"driver-{len(self._drivers)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                env={**self.environment, "TILEGEN_CACHE_DIR": str(self.folder / cache)},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._drivers.append(process)
        return Driver(process, log)


class Driver:
    """A driver that runs."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def said(self) -> str:
        """The text that the driver has logged so far."""
        return self._log.read_text(encoding="utf-8")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has logged a text, so many times."""
        deadline = time.monotonic() + 120
        while self.said.count(text) < times:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it printed."""
        out, _ = self.process.communicate(timeout=300)
        return self.process.returncode, out


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def lines_of(cache: Path) -> list[dict[str, Any]]:
    """Return all trials in a cache, in the order of their files."""
    files = sorted((cache / "trials").rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
