"""Tune the problems of a catalogue on this machine, and share the winners through a folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tilegen

with tempfile.TemporaryDirectory() as folder:
    shared, own = Path(folder, "shared"), Path(folder, "own")
    shared.mkdir()
    catalogue = Path(folder, "models.txt")
    catalogue.write_text("hq4 hkv2 q256 d64 fp32 causal\nhq4 q256 d32 fp32 window(63,0)\n")
    with tilegen.settings(cache_dir=str(own)):
        for line in catalogue.read_text().splitlines():
            (record,) = tilegen.tune(line, kernel="fwd", trials=3)
            print(f"{record.problem}: {record.config.key} of {record.trials} configs")

    def command(*words: str) -> None:
        """Run a command of tilegen with the own folder as its cache."""
        environment = {**os.environ, "TILEGEN_CACHE_DIR": str(own)}
        subprocess.run([sys.executable, "-m", "tilegen", *words], env=environment, check=True)

    command("cache", "push", str(shared))
    # Another machine sets TILEGEN_CACHE_PATH to the shared place, and its calls use the winners.
    command("cache", "list", str(shared))
