"""Ctrl-C ends a program at once, whatever its compilers and its threads are at."""

from __future__ import annotations

from pathlib import Path

from tests.support import warm

BUSY = """
import os, signal, sys, threading, time
from tilegen.compiling import workers
from tilegen.bundles import building
from tilegen.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)
HANGS = "import sys, time; sys.stdin.buffer.read(1); open(sys.argv[1], 'w'); time.sleep(3600)"
workers.python = lambda code: [sys.executable, "-c", HANGS, compiling]
begin, compiling, choosing = building._Builder.begin, sys.argv[2], threading.Event()

def hanging(self, problem, *rest):
    if problem.seqlen_q == 128:  # the second is never chosen, and threads cannot be interrupted
        choosing.set()
        time.sleep(3600)
    return begin(self, problem, *rest)

def press() -> None:
    choosing.wait()
    while not os.path.exists(compiling):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

building._Builder.begin = hanging
threading.Thread(target=press, daemon=True).start()
sys.argv = ["tilegen", "generate", "hq1 q64 d16 fp16", "hq1 q128 d16 fp16",
            "--arch", "sm_90", "--forward-only", "--out", sys.argv[1]]
main()
"""


def test_generate_waits_neither_for_compilers_nor_for_threads(tmp_path: Path) -> None:
    process = warm.start(BUSY, str(tmp_path / "dist"), str(tmp_path / "compiling"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("error: interrupted; what is done is kept: the same command goes on\n")
