"""First mistakes on the command line: other names of words, `tilegen help`, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.pure.cli.test_cli import PROBLEM, failing, run
from tilegen.cli.help import TOPICS
from tilegen.cli.main import app, main
from tilegen.devices import device_named
from tilegen.environment import VARIABLES
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.gpus.spec import catalogue, gpu
from tilegen.kernels.config import OPTIONS, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.masks.notation import CONSTRUCTORS, MASKS, NAMES, parse_mask
from tilegen.problem import WORDS, AttentionProblem

MEANT = {
    "hq8 q512 d64 bf16 casual": "causal",
    "hq8 q512 d64 bf16 Causal": "causal",
    "hq8 q4k d64 bf16": "q4096",
    "hq8 q1m d64 bf16": "q1048576",
    "hq8 q64 d64 float16": "fp16",
    "hq8 q64 d64 half": "fp16",
    "hq8 q64 d64 torch.bfloat16": "bf16",
    "hq8 q64 d64 BF16": "bf16",
    "h32 q64 d64 bf16": "hq32",
    "hq8 s4096 d64 bf16": "q4096",
    "hq8 q64 hd128 bf16": "d128",
    "hq8 q64 d64 bf16 drop": "dropout",
}


@pytest.mark.parametrize("text", MEANT)
def test_the_right_word_is_named(text: str) -> None:
    with pytest.raises(InvalidProblem, match=rf"no part of one; did you mean {MEANT[text]}\b"):
        AttentionProblem.parse(text)


def test_masks_inside_of_masks_are_named() -> None:
    with pytest.raises(InvalidProblem, match="did you mean window"):
        AttentionProblem.parse("hq8 q64 d64 bf16 causal&windw(9,0)")


def test_words_that_mean_nothing_get_no_hint() -> None:
    with pytest.raises(InvalidProblem, match=r"'fp8' is no part of one$"):
        AttentionProblem.parse("hq8 q64 d64 fp8")


def _letters(part: str) -> str:
    return "" if part == "bf16" else part.partition("(")[0].rstrip("0123456789/")


@pytest.mark.parametrize("word", [*WORDS, *MASKS], ids=lambda word: word.written)
def test_examples_of_the_notation_are_read(word: object) -> None:
    """Each example alone changes the problem that it is put in, or is its default."""
    assert isinstance(word, tuple)
    example, plain = word[2], "hq32 hkv1 q4096 d128 bf16"
    kept = [part for part in plain.split() if _letters(part) != _letters(example)]
    problem = AttentionProblem.parse(" ".join([*kept, example]))
    same = example in ("bf16", "hq32", "q4096", "d128", "full")
    assert (problem == AttentionProblem.parse(plain)) == same


def test_every_mask_of_the_notation_has_its_words() -> None:
    assert {name.rstrip("_") for name in CONSTRUCTORS} == set(NAMES)
    for word in MASKS:
        assert parse_mask(word.example).notation


def test_shells_may_split_a_problem() -> None:
    split = run("propose", *PROBLEM.split(), "--gpu", "h200", "--top", "1")
    assert split == run("propose", PROBLEM, "--gpu", "h200", "--top", "1")


@pytest.mark.parametrize(
    "driver, name",
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200")],
)
def test_names_of_drivers_are_understood(driver: str, name: str) -> None:
    assert gpu(driver).name == name


def test_architectures_list_their_gpus() -> None:
    with pytest.raises(Unsupported, match=r"sm_90, which is that of h100-pcie, h100, h200; .*h200"):
        gpu("sm_90")


def _written(path: Path, **changes: object) -> Path:
    values = {**asdict(gpu("h200")), "name": "mine", **changes}
    lines = (f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None)
    path.write_text("\n".join(lines))
    return path


def test_a_gpu_of_a_file_is_proposed_for(tmp_path: Path) -> None:
    path = _written(tmp_path / "mine.toml", num_sms=33)
    assert device_named(str(path)).name == "mine"
    lines = run("propose", PROBLEM, "--gpu", str(path), "--top", "1").splitlines()
    assert lines[0].endswith("on mine (NVIDIA H200 SXM)")
    assert lines[2] != run("propose", PROBLEM, "--gpu", "h200", "--top", "1").splitlines()[2]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_sms": -3}, "num_sms of a GPU must be an int of at least 1, got -3"),
        ({"num_sms": 1.5}, "num_sms of a GPU must be an int of at least 1, got 1.5"),
        ({"clock_hz": "fast"}, "clock_hz of a GPU must be a number of at least 1, got 'fast'"),
        ({"arch": 90}, "arch of a GPU must be text, got 90"),
        ({"name": "../x"}, r"letters a to z, digits and hyphens, got '\.\./x'"),
        ({"l2_bytes": None}, "missing: l2_bytes"),
        ({"cores": 4}, "unknown: cores"),
    ],
)
def test_files_of_gpus_are_checked(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match=message):
        device_named(str(_written(tmp_path / "mine.toml", **changes)))


def test_files_of_gpus_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="No such file"):
        device_named(str(tmp_path / "mine.toml"))


@pytest.mark.slow
def test_help_explains_every_word() -> None:
    notation, settings = run("help", "notation"), run("help", "settings")
    for option in OPTIONS.values():
        assert f"\n{option.letter}{'' if option.is_flag else 'N'} " in notation
    assert len(json.loads(run("help", "notation", "--json"))) == len(WORDS) + 1 + len(OPTIONS)
    for variable in VARIABLES:
        assert variable in settings
    for name in NAMES:
        assert f"{name}" in run("help", "masks")
    for spec in catalogue():
        assert f"{spec.name} " in run("help", "gpus")
    for kernel in KERNELS:
        assert f"{kernel} " in run("help", "kernels")
    for topic in TOPICS:
        assert max(map(len, run("help", topic).splitlines())) <= 100
    assert TileConfig.parse("m128n64w8s3t").key == "m128n64w8s3t"
    assert "m128n64w8s3t" in notation


def test_help_of_commands() -> None:
    assert run("help") == run("--help")
    assert run("help", "explain") == run("explain", "--help")


def test_unknown_topics_name_like_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean masks?" in failing(monkeypatch, capsys, "help", "mask")


def test_errors_are_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilegen", "propose", "nonsense", "--json"])
    with pytest.raises(SystemExit, match="2"):
        main()
    captured = capsys.readouterr()
    error = json.loads(captured.out)
    assert error["exit"] == 2
    assert captured.err == f"error: {error['error']}\n"


def test_completion_is_installed_for_shells() -> None:
    environment = {**os.environ, "_TILEGEN_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    environment["COMP_WORDS"] = "tilegen propose --gpu h2"
    done = subprocess.run(
        [sys.executable, "-c", "from tilegen.cli.main import app; app(prog_name='tilegen')"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "h200" in done.stdout.split(), done.stderr
    assert "--show-completion" in run("--help")
    assert app.info.context_settings is not None


NAMES_ONLY = """
import sys
from tilegen.cli.main import main
sys.argv = ["tilegen", *sys.argv[1:]]
try:
    main()
finally:
    print(*sorted({"torch", "sympy", "triton"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["explain", PROBLEM, "--gpu", "h201"],
        ["explain", "hq8 q512 d64 bf16 casual"],
        ["show", PROBLEM, "--gpu", "h200", "--kernel", "bwd_dp"],
        ["verify", "hq8 q512 d64 bf16 casual"],
        ["tune", PROBLEM, "--kernel", "bwd"],
        ["cache", "why", PROBLEM, "--gpu", "x"],
    ],
    ids=lambda words: words[0],
)
def test_names_are_checked_before_slow_imports(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMES_ONLY, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "\n"), done.stderr


SLEEPS = """
import signal, sys, time
from tilegen.cli import doctor, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
def examine():
    print("begun", flush=True)
    time.sleep(60)
doctor.examine = examine
sys.argv = ["tilegen", "doctor"]
main.main()
"""


@pytest.mark.parametrize("sent, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_command_in_order(sent: signal.Signals, code: int) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.send_signal(sent)
    _, err = program.communicate(timeout=60)
    assert (program.returncode, err.count("\n")) == (code, 1), err
    assert err.startswith("error: interrupted; what is done is kept")
