"""Python processes that compile kernels on request.

`multiprocessing` is no alternative. Its children import the caller's main script again, which fails
for training scripts without a main guard. A crash of the compiler breaks its whole pool.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import Any

from tilegen import cpu
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.emit.identity import RenderedKernel
from tilegen.environment import CACHE_DIR, current
from tilegen.errors import BuildFailed, TilegenError


def python(code: str) -> list[str]:
    """Return the command that runs `code` in a new process of this interpreter."""
    return [sys.executable, "-c", code]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child that imports the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


class Ended(Exception):
    """A compilation that `Worker.kill` ended, since nobody waits for its result any more."""


class CompileWorker:
    """A process that compiles kernels one after another. It starts at first use, and again after a
    crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def compile(
        self, rendered: RenderedKernel, arch: str, *, line_info: bool = True
    ) -> CompiledKernel | BuildFailed:
        """Compile in the process, as `compile_for` does.

        Return BuildFailed if the compilation fails, or if the compiler crashes. Raises any other
        error of `compile_for`, and Ended after `kill`.
        """
        if self._is_killed:
            raise Ended
        process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        try:
            pickle.dump((rendered, arch, line_info), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self._process = None
            if self._is_killed:
                raise Ended from None
            return BuildFailed(f"{rendered.function} for {arch}: the compiler died (exit {code})")
        if isinstance(answer, Exception) and not isinstance(answer, BuildFailed):
            raise answer
        return answer

    def kill(self) -> None:
        """End the process for good, even while it compiles for another thread."""
        self._is_killed = True
        if process := self._process:
            process.kill()

    def close(self) -> None:
        """End the process; another `compile` starts it again."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            python("from tilegen.compiling.workers import serve; serve()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The interpreter cannot compile.
            env=environment(TRITON_INTERPRET="0", **{CACHE_DIR: str(current().cache_dir)}),
        )
        return self._process


class Pool:
    """Workers for several lists of kernels. Close the pool, or use it in a `with` statement."""

    def __init__(self, size: int | None = None) -> None:
        """Create `size` workers, by default as many as the cores that this process may use."""
        self.size = size or len(os.sched_getaffinity(0))
        self._workers = [CompileWorker() for _ in range(self.size)]
        self._idle: SimpleQueue[CompileWorker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def compile(
        self, rendered: RenderedKernel, arch: str, *, line_info: bool = True
    ) -> CompiledKernel | BuildFailed:
        """Compile in the next idle worker, as `Worker.compile` does. May be called from several
        threads."""
        worker = self._idle.get()
        try:
            return worker.compile(rendered, arch, line_info=line_info)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers after their present compilations."""
        for _ in range(self.size):
            self._idle.get().close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self.close()
            return
        for worker in self._workers:  # after Ctrl-C, nobody waits for the compilations
            worker.kill()


def serve() -> None:
    """Compile the kernels that arrive on standard input; write the results to standard output."""
    requests = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # the output of a compiler must not mix with the answers
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                rendered, arch, line_info = pickle.load(requests)
                answer: Any
                try:
                    answer = compile_for(rendered, arch, line_info=line_info)
                    if answer.on_cpu is None:
                        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                            _ = answer.code  # disassemble here, not where kernels are measured
                except TilegenError as error:
                    answer = type(error)(str(error))  # without its cause, which may not pickle
                except Exception as error:
                    answer = RuntimeError(f"{type(error).__name__}: {error}")
                pickle.dump(answer, answers)
                answers.flush()


def compile_many(
    rendered: Sequence[RenderedKernel],
    arch: str,
    *,
    workers: int | None = None,
    pool: Pool | None = None,
) -> Iterator[tuple[RenderedKernel, CompiledKernel | BuildFailed]]:
    """Compile kernels on all cores, and yield each as it finishes; a failure is yielded as a value.

    The workers of a `pool` stay alive. Without a pool, `workers` processes are started, by default
    one per core, and ended after the last kernel.
    """
    if not rendered:
        return
    if pool is None:
        size = min(workers or len(os.sched_getaffinity(0)), len(rendered))
        if size == 1 and not cpu.is_interpreting():
            for kernel in rendered:
                yield kernel, _compile_or_fail(kernel, arch)
            return
        with Pool(size) as own:
            yield from compile_many(rendered, arch, pool=own)
        return
    with ThreadPoolExecutor(pool.size) as threads:
        futures = {threads.submit(pool.compile, kernel, arch): kernel for kernel in rendered}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # the consumer may stop early
            threads.shutdown(wait=False, cancel_futures=True)


def _compile_or_fail(rendered: RenderedKernel, arch: str) -> CompiledKernel | BuildFailed:
    try:
        return compile_for(rendered, arch)
    except BuildFailed as error:
        return BuildFailed(str(error))  # without its cause, which may not pickle
