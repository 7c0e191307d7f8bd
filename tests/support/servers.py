"""Real servers on loopback for the tests of remote locations, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

# One request after the other: moto looks at the condition of a put and then does it, and between
# the two another thread could come in, which no real store allows.
S3 = """
import logging, sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
make_server(
    "127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app)
).serve_forever()
"""


def require_s3() -> None:
    """Skip the test if the S3 server or client is not installed, naming the missing package."""
    for package in ("moto", "flask", "s3fs"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}; pip install 'tilegen[dev]'")


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start an S3 server; yield the environment in which s3:// URLs lead to it."""
    require_s3()
    import s3fs

    port = _free_port()
    with _running([sys.executable, "-c", S3, str(port)]):
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/moto-api/")
        s3fs.S3FileSystem.clear_instance_cache()  # of clients of an earlier server
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """Serve a folder; yield its URL."""
    port = _free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with _running([*command, "--directory", str(folder)]):
        _wait_for(f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def silent_server() -> Iterator[tuple[str, list[socket.socket]]]:
    """Accept every connection and never say a word; yield the URL and the connections so far."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


@contextlib.contextmanager
def raw_server(body: Callable[[], Iterable[bytes]], *headers: str) -> Iterator[str]:
    """Answer every request with these headers, and GET with the pieces of `body`, which arrive one
    by one; then hang up. Yield the URL."""
    head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", "Connection: close", *headers))

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = connection.recv(65536)
            connection.sendall(head.encode() + b"\r\n")
            for piece in body() if request.startswith(b"GET") else ():
                connection.sendall(piece)
                time.sleep(0.001)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def pieces(data: bytes, size: int) -> list[bytes]:
    """Return `data` cut into pieces."""
    return [data[start : start + size] for start in range(0, len(data), size)]


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} does not answer: {error}") from error
            time.sleep(0.05)
