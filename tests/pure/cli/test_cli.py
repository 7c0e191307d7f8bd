"""The command line as a user types it."""

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilegen
from tests.support.records import RECORD
from tilegen import pipeline
from tilegen.check.verification import Check
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import search_space
from tilegen.cli import main
from tilegen.cli.demo import Demo
from tilegen.cli.main import app
from tilegen.cpu.passes import passes_to_time
from tilegen.gpus.spec import gpu
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Trial
from tilegen.task import KernelTask
from tilegen.tuning.jobs import jobs_of
from tilegen.tuning.measure import Measurement, summarise
from tilegen.tuning.trials import TrialLog
from tilegen.units import seconds_text

pytestmark = pytest.mark.oldest

PROBLEM = "hq8 hkv2 q512 d64 bf16 causal"
COMMANDS = {
    "demo",
    "propose",
    "explain",
    "show",
    "generate",
    "bundle",
    "tune",
    "warm",
    "verify",
    "doctor",
    "help",
    "compare",
    "examples",
    "cache list",
    "cache show",
    "cache why",
    "cache diff",
    "cache export",
    "cache import",
    "cache merge",
    "cache verify",
    "cache push",
    "cache pull",
    "cache promote",
    "cache prune",
}
WRITING = {"export", "import", "merge", "push", "pull", "promote", "prune", "tune"}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def failing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    code: int = 2,
) -> str:
    """Run `main` on a command line that must fail; return its one line."""
    monkeypatch.setattr(sys, "argv", ["tilegen", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_every_command_is_known_here() -> None:
    names = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    names |= {f"cache {c.name}" for c in main.cache_app.registered_commands}
    assert names == COMMANDS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_an_example_and_json(command: str) -> None:
    text = " ".join(run(*command.split(), "--help").split())
    assert f"Example: tilegen {command}" in text
    assert "--json" in text
    if command.split()[-1] in WRITING:
        assert "--dry-run" in text


def test_propose_ranks() -> None:
    lines = run("propose", PROBLEM, "--gpu", "h200", "--top", "3").splitlines()
    title, header, *rest = [line for line in lines if not line.startswith("* as compiled")]
    rows, reason = rest[:3], rest[3:]
    assert title == f"{AttentionProblem.parse(PROBLEM)}, on h200 (NVIDIA H200 SXM)"
    assert header.split()[:2] == ["tile", "predicted"]
    assert max(map(len, lines)) <= 100
    assert reason[0].startswith(rows[0].split()[0] + ": ")
    assert "rows stationary" in " ".join(reason)
    ranked = json.loads(run("propose", PROBLEM, "--gpu", "h200", "--top", "3", "--json"))
    assert [entry["config"]["block_m"] for entry in ranked]
    assert ranked[0]["estimate"]["read_bytes"] > 0
    times = [entry["estimate"]["seconds"] for entry in ranked]
    assert times == sorted(times)


def test_fast_memory_is_respected() -> None:
    text = run("propose", PROBLEM, "--gpu", "h200", "--fast-memory", "48KiB", "--json")
    ranked = json.loads(text)
    assert all(entry["estimate"]["smem_bytes"] <= 48 * 1024 for entry in ranked)


@pytest.mark.slow
def test_explain_says_why() -> None:
    text = run("explain", PROBLEM, "--gpu", "a100", "--kernel", "fwd", "--all")
    for what in (
        "because",
        "V_kv*d_qk*e*g",
        "bound",
        "next best",
        "with other fast memory",
        "waves",
    ):
        assert what in text
    explained = json.loads(run("explain", PROBLEM, "--gpu", "a100", "--json"))
    kernels = kernels_of(AttentionProblem.parse(PROBLEM), gpu("a100"))
    assert [one["kernel"] for one in explained] == list(kernels)
    assert {"fwd", "bwd_preprocess"} < set(kernels)
    assert all(one["bound"]["ratio"]["value"] >= 1 for one in explained)
    assert all(one["traffic"]["written"]["value"] > 0 for one in explained)


def test_explain_of_a_config_of_ones_own() -> None:
    asked = ("--kernel", "fwd", "--config", "m16n16w4s1", "--section", "tile")
    text = run("explain", PROBLEM, "--gpu", "h200", *asked)
    assert "TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)" in text
    assert "times as long as the model's choice" in text


def test_show_prints_a_kernel_and_nothing_else() -> None:
    """Its first line names the device; the rest is the file."""
    asked = ("show", PROBLEM, "--gpu", "h200", "--kernel", "bwd_dq", "--config", "m64n32w4s2")
    shown = run(*asked)
    assert compile(shown, "kernel.py", "exec").co_consts[0].startswith("Attention backward")
    head, source = shown.split("\n", 1)
    assert head == "# For h200 (NVIDIA H200 SXM)."
    assert source.startswith('"""Attention backward: dq.')
    told = json.loads(run(*asked, "--json"))
    assert told["gpu"] == "h200"
    assert told["source"] == source


def test_cache_list_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    assert "no record" in run("cache", "why", PROBLEM, "--gpu", "t4", "--kernel", "fwd")
    (tmp_path / "h200" / "fwd").mkdir(parents=True)
    (tmp_path / "h200" / "fwd" / "broken.json").write_text("{")
    listed = json.loads(run("cache", "list", "--json"))
    own = [entry for entry in listed if entry["origin"] == "own"]
    assert [entry["record"] for entry in own] == [None]
    assert own[0]["file"].endswith("broken.json")
    assert own[0]["trouble"]
    assert isinstance(json.loads(run("cache", "why", PROBLEM, "--json")), list)


def test_doctor() -> None:
    actual = json.loads(run("doctor", "--json"))
    assert {"tilegen", "torch", "triton", "gpu", "own directory", "templates"} <= set(actual)
    assert "triton" in run("doctor")


BAD = {
    "no such command": (["explode"], "explode"),
    "no argument": (["propose"], "see tilegen propose --help"),
    "no such option": (["propose", PROBLEM, "--nope"], "see tilegen propose --help"),
    "no such option of a subcommand": (["cache", "list", "--no"], "see tilegen cache list --help"),
    "no such option of all": (["--nope"], "see tilegen --help"),
    "number too long": (["propose", f"hq8 q{'9' * 5000} d64 bf16"], "12 digits, got 5000 digits"),
    "unknown dtype": (["propose", "hq8 q64 d64 fp8"], "'fp8' is no part of one"),
    "no dtype": (["propose", "hq8 q64 d64 causal"], "no dtype, which is one of fp16, bf16, fp32"),
    "two dtypes": (["propose", "hq8 q64 d64 fp16 bf16"], "two dtypes, fp16 and bf16"),
    "an unknown part": (
        ["propose", "hq8 k64 d64 bf16"],
        "'k64' is no part of one; did you mean kv64?",
    ),
    "two masks": (["propose", "hq8 q64 d64 bf16 full causal"], "two masks, full and causal; join"),
    "time runs back": (["demo", "--seconds", "-1"], "above 0, got -1.0; see tilegen demo --help"),
    "no time": (["tune", PROBLEM, "--seconds", "nan"], "above 0, got nan"),
    "no such part": (["tune", "--catalog", PROBLEM, "--shard", "2/2"], "--shard must be I/N"),
    "no time of day": (["tune", "--catalog", PROBLEM, "--until", "6"], "such as 06:00, got '6'"),
    "neither problem nor catalogue": (["tune"], "a problem or --catalog FILE, got both or neither"),
    "a name too long": (
        ["tune", "--catalog", "a" * 5000],
        "File name too long",
    ),
    "no such catalogue": (
        ["tune", "--catalog", "/none.txt"],
        "cannot read /none",
    ),
    "malformed notation": (["propose", "hq8"], "expected a problem"),
    "mask nobody knows": (["explain", "hq8 q8 d64 bf16 diagonal(3)"], "expected a mask"),
    "unknown GPU": (["propose", PROBLEM, "--gpu", "h201"], "did you mean h200"),
    "unknown kernel": (["show", PROBLEM, "--kernel", "bwd"], "kernel must be one of"),
    "unknown arch": (["generate", PROBLEM, "--arch", "hopper"], "arch must be one of"),
    "one of two archs unknown": (
        ["generate", PROBLEM, "--arch", "sm_90", "sm_9x"],
        "arch must be one of",
    ),
    "arch for a problem": (["generate", "sm_90", "--gpu", "h200"], "expected a problem"),
    "neither arch nor gpu": (["generate", PROBLEM], "expected --arch or --gpu"),
    "no problem": (["generate", "--arch", "sm_90"], "problems or a catalog"),
    "no such file": (["generate", "--catalog", "none.txt", "--arch", "sm_90"], "none.txt"),
    "bad config": (["show", PROBLEM, "--config", "128x64"], "such as m128n64w8s3"),
    "bad memory": (["propose", PROBLEM, "--gpu", "h200", "--fast-memory", "lots"], "48KiB"),
    "too little memory": (["propose", PROBLEM, "--gpu", "h200", "--fast-memory", "1KiB"], "bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_typed_wrong_is_one_line_and_exit_code_2(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = BAD[name]
    assert message in failing(monkeypatch, capsys, *arguments)


def test_demo_compares_with_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """For mask and score; PyTorch's own attention is left out where there is a score."""
    said: list[str] = []

    def measured(call: Callable[[], object]) -> Measurement:
        call()
        return summarise([10.0])

    monkeypatch.setattr("tilegen.cli.demo.measure", measured)
    monkeypatch.setattr(Demo, "on_gpu", True)
    made = passes_to_time
    monkeypatch.setattr("tilegen.cli.demo.passes_to_time", lambda *given: made(*given[:2], "cpu"))
    problem = "b2 hq2 q20 d16 fp32 prefix_lm(@b:8) score(s/t0[h],float32)"
    times = Demo(said.append, gpu("h200"))._measure(AttentionProblem.parse(problem))
    expected = {"tilegen": pytest.approx(1e-5)}
    assert times == {"forward": expected, "backward": expected}
    assert sum("compared on masks only" in line for line in said) == 2


def test_demo_fits_the_terminal_and_ends_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiling, running and tuning, which other tests have."""
    choose, checks = pipeline.choose, []
    right = Check(
        tensor="out",
        ok=True,
        error=1 / 3,
        allowed=2 / 3,
        index=(0, 1, 2, 3),
        found=1 / 7,
        expected=0.1,
    )

    def verified(problem: AttentionProblem, configs: object, device: str) -> tuple[Check, ...]:
        checks.append(problem)
        return (right,)

    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tilegen.cli.demo.verify", verified)
    monkeypatch.setattr("tilegen.cli.demo.tune", lambda *_, **__: RECORD)
    monkeypatch.setattr(Demo, "_measure", lambda *_: {})
    monkeypatch.setattr(pipeline, "choose", lambda *given, **_: choose(*given))
    problem = AttentionProblem.parse(PROBLEM)
    said: list[str] = []
    Demo(said.append, gpu("h200"), width=72).run(problem, 1.0)
    lines = "\n".join(said).splitlines()
    *_, explain, compare = lines
    shown = [line for line in lines if str(tmp_path) not in line]  # a path is not broken
    assert max(map(len, shown)) <= 72
    assert f"on {checks[0]}" in " ".join(map(str.strip, lines))
    chosen = choose(problem, gpu("h200"), "forward")["fwd"].ranked.candidates[0]
    assert f"{seconds_text(chosen.estimate.seconds)} predicted" in "\n".join(lines)
    folded = lines.index(next(line for line in lines if line.startswith("fwd ") and "m" in line))
    reason = next(i for i, line in enumerate(lines) if i > folded and "rows stationary" in line)
    assert lines[reason + 1].startswith(15 * " ")
    assert shlex.split(explain)[-3:] == ["tilegen", "explain", problem.key]
    assert shlex.split(compare)[-4:] == ["tilegen", "compare", problem.key, "--backward"]


@pytest.mark.parametrize("command", [(), ("cache",), ("cache", "export"), ("propose",)])
def test_short_help(command: tuple[str, ...]) -> None:
    assert run(*command, "-h") == run(*command, "--help")


def test_version() -> None:
    assert run("--version") == f"tilegen {tilegen.__version__}\n"


@pytest.mark.parametrize("command", ["export", "promote"])
def test_help_names_the_default_place(command: str) -> None:
    text = " ".join(run("cache", command, "--help").split())
    assert "by default the own ones" in text
    assert "default: own" in text
    assert "default: all" not in text


def test_tuning_can_be_planned_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: None)
    spec, problem = gpu("h200"), AttentionProblem.parse(PROBLEM).bucket
    (job,) = jobs_of([problem], spec, ["fwd"])
    space = search_space(KernelTask.of("fwd", problem, spec))
    log = TrialLog(tmp_path, "h200", "fwd", problem, job.conditions)
    log.append(Trial(config=space[0], measurement=summarise([10.0]), seconds=0.1))
    before = sorted(tmp_path.rglob("*"))
    told = {
        "gpu": "h200",
        "kernel": "fwd",
        "problem": problem.key,
        "configs": len(space),
        "measured": 1,
    }
    for command in (["tune", PROBLEM], ["tune", "--catalog", PROBLEM]):
        asked = [*command, "--kernel", "fwd", "--dry-run"]
        assert json.loads(run(*asked, "--json"))["kernels"] == [told]
        assert run(*asked).startswith(f"would tune fwd {len(space):15} configs, 1 of them measured")
    assert sorted(tmp_path.rglob("*")) == before


def test_errors_of_the_system_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/mnt/a\n\x1b[31m")

    monkeypatch.setattr("tilegen.cli.doctor.examine", full)
    line = failing(monkeypatch, capsys, "doctor", code=1)
    assert line == r"error: '/mnt/a\n\x1b[31m': No space left on device"


def test_ctrl_c_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilegen.cli.doctor.examine", interrupted)
    line = failing(monkeypatch, capsys, "doctor", code=130)
    assert line == "error: interrupted; what is done is kept: the same command goes on"


def test_tune_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: None)
    assert "PyTorch sees none" in failing(monkeypatch, capsys, "tune", PROBLEM)


def test_the_installed_command_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tilegen", "propose", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: expected a problem")
