"""Attentions in processes of their own with a memory limit, called in turns."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import has_gpu
from tilegen.comparing import memory
from tilegen.comparing.children import DoesNotFit, Failed, Worker

Threads = Annotated[int, typer.Option(help="Threads of each process; 0: as PyTorch does.")]
Gib = Annotated[float, typer.Option(help="Memory of each process; 0: half of what is free.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Small models, in seconds.")]


class Turns:
    """Workers by name; one that fails is lost, and its reason is kept. Use it in a `with`."""

    def __init__(self, *, threads: int, gib: float) -> None:
        self.device = "cuda" if has_gpu() else "cpu"
        self.workers: dict[str, Worker] = {}
        self.lost: dict[str, Exception] = {}
        self._limits: dict[str, Any] = {"gib": gib, "device": self.device, "threads": threads}
        self._stack = contextlib.ExitStack()

    def start(self, name: str, *make: Any) -> None:
        """Make an object in a process, from its class and arguments."""
        try:
            self.workers[name] = self._stack.enter_context(Worker(*make, **self._limits))
        except (DoesNotFit, Failed) as error:
            self.lost[name] = error

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Return the result of a worker's method; None if it is lost, or was before."""
        if name not in self.workers:
            return None
        try:
            return self.workers[name].call(method, *arguments)
        except (DoesNotFit, Failed) as error:
            self.lost[name] = error
            del self.workers[name]
            return None

    def why(self, name: str) -> dict[str, str]:
        """Return the columns of a row that has no times."""
        error = self.lost[name]
        status = "does not fit" if isinstance(error, DoesNotFit) else "failed"
        return {
            "status": "unsupported" if "ValueError" in str(error) else status,
            "detail": str(error),
        }

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def limits(threads: int, gib: float) -> dict[str, Any]:
    """Return threads and memory of each process. Without transformers, say so and exit with 1."""
    if find_spec("transformers") is None:
        print("models need transformers; install it with: pip install 'tilegen[integrations]'")
        raise typer.Exit(1)
    free = torch.cuda.mem_get_info()[0] if has_gpu() else memory.available()
    return {
        "threads": threads or torch.get_num_threads(),
        "gib": gib or free / memory.GIB / 2,
    }
