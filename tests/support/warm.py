"""Programs in processes of their own that have PyTorch imported already, which alone takes seconds.

A process that has imported PyTorch, and nothing else, forks for every program. Use it for what
`python -c` would do; not for what must hold before PyTorch is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


class Program:
    """A program that runs: `returncode` is None until it has ended."""

    def __init__(self, code: str, *argv: str, env: Mapping[str, str] | None, seed: int) -> None:
        self.returncode: int | None = None
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._to = socket.socket(socket.AF_UNIX)
        self._to.connect(_server(seed))
        asked = {"code": code, "argv": argv, "env": dict(os.environ if env is None else env)}
        size = len(text := json.dumps(asked).encode()).to_bytes(8, "big")
        socket.send_fds(self._to, [size], [self._out.fileno(), self._err.fileno()])
        self._to.sendall(text)

    def poll(self, seconds: float = 0.0) -> int | None:
        """Return the exit status, negative for a signal, or None while the program runs."""
        if self.returncode is None and select.select([self._to], [], [], seconds)[0]:
            self.returncode = int(self._to.recv(64))
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Wait for the end; return what the program wrote to stdout and stderr."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("a program of tests", timeout)
        texts: list[str] = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        self._to.close()
        return texts[0], texts[1]


def start(code: str, *argv: str, env: Mapping[str, str] | None = None, seed: int = 1) -> Program:
    """Run a program; `seed` is that of its hashes, `env` its whole environment."""
    return Program(code, *argv, env=env, seed=seed)


def output(code: str, *argv: str, env: Mapping[str, str] | None = None, seed: int = 1) -> str:
    """Run a program and return its output."""
    program = start(code, *argv, env=env, seed=seed)
    out, err = program.communicate()
    if program.returncode:
        print(err, file=sys.stderr)
        raise subprocess.CalledProcessError(program.returncode, "a program of tests", out, err)
    return out


@functools.cache
def _server(seed: int) -> str:
    """Return the address of a process that forks, and ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="tilegen-warm-")
    address = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            pass_fds=[listener.fileno()],
        )

    def end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return address


# --------------------------------------------------------------------------------------------------
# The process that forks


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork for every program that is asked for; return what is asked, in the process that is to do
    it."""
    import torch  # noqa: F401 (before the forks, so that it is done once)

    gc.collect()
    gc.freeze()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    size, files, _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as stream:
        asked = json.loads(stream.read(int.from_bytes(size, "big")))
    # One process is the program, its parent waits for it and tells how it has ended.
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # who asked has ended, or did not wait
            connection.sendall(str(status).encode())
        os._exit(0)
    connection.close()
    listener.close()
    for file, standard in zip(files, (1, 2), strict=True):
        os.dup2(file, standard)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return asked


def main() -> None:
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["-c", *asked["argv"]]
    sys.modules["__main__"] = program = ModuleType("__main__")
    exec(compile(asked["code"], "<string>", "exec"), vars(program))


if __name__ == "__main__":
    main()
