"""`tilegen cache` as a user types it: each command does what its help says, with --json too."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.pure.store.test_store_trials import lines_of
from tests.support.records import PROBLEM, RECORD, own, place, record
from tilegen.cli import main
from tilegen.cpus.host import current_cpu
from tilegen.errors import NoRecord
from tilegen.store import current_versions, save
from tilegen.store.trials import trials_path

KEY = PROBLEM.key
ASK = (KEY, "--gpu", "h200", "--kernel", "fwd")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the own directory, with two findings about one key."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "mine"))
    save(record(us=400.0, source="aa"))
    save(record(us=500.0, source="bb"))
    return tmp_path / "mine"


def run(*arguments: str, code: int = 0) -> str:
    return run_command("cache", *arguments, code=code)


def run_command(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main.app, [*arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def told(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


@pytest.mark.usefixtures("mine")
def test_list_of_one_place() -> None:
    (line,) = run("list", "own").splitlines()
    assert line.startswith("own     h200      fwd            m128n64w8s3           400 us")
    assert [one["record"]["source"] for one in told("list", "own")] == ["aa"]
    assert told("list", "shipped") == []


@pytest.mark.usefixtures("mine")
def test_show() -> None:
    text = run("show", *ASK)
    assert text.startswith(f"{KEY}, on h200 (NVIDIA H200 SXM)\n")
    assert "(own), 0 trials\n  measured in unknown surroundings\n" in text
    assert "stands before fwd            m128n64w8s3           500 us" in text
    assert "faster (400 us, the other 500 us)" in text
    assert '"median_us": 400.0' in text
    (entry,) = told("show", *ASK)
    assert entry["gpu"] == "h200"
    assert entry["record"]["source"] == "aa"
    assert [other["source"] for other in entry["others"]] == ["bb"]
    (borrowed,) = told("show", KEY, "--gpu", "h100", "--kernel", "fwd")
    assert borrowed["borrowed"]
    assert "borrowed from h200" in run("show", KEY, "--gpu", "h100", "--kernel", "fwd")


def test_trials_that_several_places_hold_count_once(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(tmp_path / "shared"))
    for place_ in (mine, tmp_path / "shared"):
        path = place_ / trials_path(RECORD.gpu, "fwd", PROBLEM)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\n".join([*lines_of(3), b'{"torn"']))
    assert "(own), 3 trials" in run("show", *ASK)


def test_why_answers_first_and_lists_other_records_if_told_to(mine: Path) -> None:
    versions = current_versions()
    place(mine, record(problem=replace(PROBLEM, seqlen_kv=128), versions=versions))
    place(mine, record(kernel="bwd_dq", versions=versions))
    place(mine, record(gpu="a100", arch="sm_80", versions=versions))
    title, answer, files, more = run("why", *ASK).splitlines()
    assert title == f"{KEY}, on h200 (NVIDIA H200 SXM)"
    assert re.fullmatch(r"fwd {13}own record( of .*)?: m128n64w8s3, 400 us", answer)
    assert files == f"records of this problem: h200/KERNEL/{RECORD.path.name}"
    assert more == "other records: --all"
    *_, count, path, differs = run("why", *ASK, "--all").splitlines()
    assert count == "fwd: 1 other record on sm_90"
    assert path == "  own  h200/fwd/b4_hq32_hkv8_q64_kv128_d128_bf16_causal.json"
    assert differs.startswith("    seqlen_kv: current 64, stored 128")
    lines = run("why", "hq8 q512 d64 bf16 causal", "--gpu", "h100", "--all").splitlines()
    assert sum("the model: no record" in line for line in lines[:6]) == 4
    assert "to make one: tilegen tune 'b1 hq8 hkv8 q512 kv512 d64 bf16 causal'" in lines
    assert max(map(len, lines)) <= 100
    assert str(mine) not in "\n".join(lines)
    borrowed = run("why", KEY, "--gpu", "h100", "--kernel", "fwd").splitlines()[1]
    assert borrowed.startswith("fwd             own record of gpu h200")
    assert told("why", *ASK)[0]["used"].endswith("_causal.json")
    assert told("why", KEY, "--gpu", "b200", "--kernel", "fwd")[0]["used"] is None


def test_a_record_of_the_processor_is_found_where_no_gpu_is(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilegen.devices.detect", lambda: None)
    cpu = current_cpu()
    with pytest.raises(NoRecord, match=f"on {cpu.name};"):
        run("show", KEY, "--kernel", "fwd")
    place(mine, record(gpu=cpu.name, arch=cpu.arch, policy=cpu.policy, us=9e6))
    title, answer, *_ = run("why", KEY, "--kernel", "fwd").splitlines()
    assert title == f"{KEY}, on {cpu.name} ({cpu.title})"
    assert answer.startswith("fwd             own record")
    assert told("why", KEY, "--kernel", "fwd")[0]["gpu"] == cpu.name
    assert run("show", KEY, "--kernel", "fwd").startswith(title)
    assert run_command("propose", KEY, "--top", "1").startswith(title)
    asked = ("show", KEY, "--kernel", "fwd", "--model")
    assert run_command(*asked).startswith(f"# For {cpu.name} ({cpu.title}).\n")
    assert run_command("explain", KEY, "--kernel", "fwd").startswith(f"problem  {title}")


def test_export_and_import(mine: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "winners.jsonl")
    assert "1 added" in run("export", file, "--dry-run")
    assert not Path(file).exists()
    run("export", file)
    other = str(tmp_path / "other")
    assert told("import", file, "--into", other, "--dry-run")[0]["action"] == "added"
    assert not Path(other).exists()
    assert "1 added, 0 changed" in run("import", file, "--into", other)
    assert (Path(other) / RECORD.path).read_bytes() == (mine / RECORD.path).read_bytes()


def test_merge_push_and_pull(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "team"
    place(there, record(kernel="bwd_dq"))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(there))
    assert told("push", "--dry-run")[0]["action"] == "added"
    assert "1 added" in run("push")
    assert "1 added, 0 changed, 1 same" in run("pull")
    assert "0 added, 0 changed, 2 same" in run("pull", str(there))
    assert "1 added" in run("push", str(tmp_path / "b"), "--kernel", "bwd_dq")
    text = run("merge", str(there), str(tmp_path / "b"), "--into", str(tmp_path / "c"))
    assert "2 added" in text
    assert "fwd/" in text
    assert (tmp_path / "c" / RECORD.path).read_bytes() == (mine / RECORD.path).read_bytes()


@pytest.mark.usefixtures("mine")
def test_a_gpu_is_named_as_everywhere_or_unknown(tmp_path: Path) -> None:
    """The catalogue lacks some GPUs that records are of."""
    save(record(gpu="h100-pcie"))
    save(record(gpu="gh200-480gb"))
    for name, added in (("H200", 1), ("H100 PCIe", 1), ("h100_pcie", 1), ("gh200-480gb", 1)):
        assert f"{added} added" in run("export", str(tmp_path / "x"), "--gpu", name)
    for command in (
        ("export", str(tmp_path / "x")),
        ("merge", "own", "--into", str(tmp_path / "a")),
        ("push", str(tmp_path / "a")),
        ("promote", "--into", str(tmp_path / "a")),
    ):
        told = CliRunner().invoke(main.app, ["cache", *command, "--gpu", "h20"])
        assert "did you mean" in str(told.exception), command


def test_a_place_that_does_not_answer_is_named(mine: Path) -> None:
    for command in (("push",), ("pull",), ("list",)):
        told = CliRunner().invoke(main.app, ["cache", *command, "http://127.0.0.1:9/x"])
        assert "location 'http://127.0.0.1:9/x' cannot be reached" in str(told.exception), command
    for file in mine.rglob("*.json"):
        file.unlink()
    told = CliRunner().invoke(main.app, ["cache", "push", "http://127.0.0.1:9/x"])
    assert "cannot be reached" in str(told.exception), "with nothing to push"


def test_push_without_a_shared_location_says_so(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tilegen", "cache", "push"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert "error: expected a location, or one in TILEGEN_CACHE_PATH" in capsys.readouterr().err


def test_verify_exits_with_1_if_something_is_wrong(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "1 files, 0 of them not in order" in run("verify", "own")
    broken = mine / "h200" / "fwd" / "torn.json"
    broken.write_text("{")
    assert f"{broken}: expected JSON" in run("verify", "own", code=1)
    assert [bool(one["trouble"]) for one in told("verify", "own", code=1)] == [False, True]
    monkeypatch.setattr("sys.argv", ["tilegen", "cache", "verify"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 1


def test_promote(mine: Path, tmp_path: Path) -> None:
    into = str(tmp_path / "cache")
    assert "1 added" in run("promote", "--into", into, "--dry-run")
    assert not Path(into).exists()
    run("promote", "--into", into)
    promoted = json.loads((Path(into) / RECORD.path).read_text())
    assert "rivals" not in promoted
    assert told("promote", "--into", into)[0]["action"] == "same"


def test_prune(mine: Path) -> None:
    broken = mine / "h200" / "fwd" / "x.json.broken"
    broken.write_text("{")
    assert "1 files would be removed" in run("prune", "--dry-run")
    assert broken.exists()
    assert [one["reason"] for one in told("prune")] == ["was set aside"]
    assert not broken.exists()
    assert "0 files removed" in run("prune", "--older-than", "36500")
    place(mine, record(kernel="bwd_dq", date="2020-01-01T00:00:00Z"))
    assert "of 2020-01-01" in run("prune", "--older-than", "365")
    assert len(told("list", "own")) == 1


@pytest.mark.usefixtures("mine")
def test_places_are_folders_urls_or_words(tmp_path: Path) -> None:
    place(tmp_path / "there", RECORD)
    for text in (str(tmp_path / "there"), f"file://{tmp_path}/there"):
        (entry,) = told("list", text)
        assert (entry["origin"], entry["file"]) == ("shared", str(tmp_path / "there" / RECORD.path))
    assert own(tmp_path).url != "own"


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """Run a command that must fail; return its one line."""
    monkeypatch.setattr("sys.argv", ["tilegen", "cache", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "command", ["list", "verify", "pull", "prune", "merge", "export out.jsonl", "promote"]
)
def test_a_place_that_is_missing_is_named(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "typo"
    said = refused(monkeypatch, capsys, *command.split(), str(missing))
    assert said.startswith(f"expected a folder of records at '{missing}', found none")
    assert not missing.exists()
    (tmp_path / "file").write_text("")
    assert "found none" in refused(monkeypatch, capsys, *command.split(), str(tmp_path / "file"))
    assert not (tmp_path / "out.jsonl").exists()
    assert "Protocol not known" in refused(monkeypatch, capsys, *command.split(), "ftpx://host/a")


@pytest.mark.usefixtures("mine")
def test_a_place_of_the_path_that_is_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Listing everything passes it over by name; what must be whole fails."""
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(tmp_path / "team"))
    assert len(told("list")) == 1
    assert f"{str(tmp_path / 'team')!r} is not a folder; skipped" in caplog.text
    for command in ("verify", "pull"):
        assert "found none" in refused(monkeypatch, capsys, command)


def test_an_own_directory_that_is_not_made_yet_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "new"))
    assert "no records yet" in run("list", "own")
    assert "0 files" in run("verify", "own")
    assert "0 files removed" in run("prune")


@pytest.mark.usefixtures("mine")
def test_export_writes_a_file_into_a_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ((), ("--dry-run",)):
        said = refused(monkeypatch, capsys, "export", str(tmp_path), "own", *options)
        assert said == f"expected a file to write, got the folder {str(tmp_path)!r}"
        file = tmp_path / "none" / "x.jsonl"
        said = refused(monkeypatch, capsys, "export", str(file), *options)
        assert said.startswith("expected a folder to write 'x.jsonl' into, found none at")
        assert not file.parent.exists()
    monkeypatch.chdir(tmp_path)
    assert "expected a file" in refused(monkeypatch, capsys, "export", ".", "own")
