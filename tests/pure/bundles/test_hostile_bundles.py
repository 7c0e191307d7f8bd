"""Untrustworthy manifests: each is refused in a line, and nothing of it is loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.bundles import PROBLEMS, copy, write_bundle
from tilegen import bundles
from tilegen.bundles.manifest import MANIFEST
from tilegen.bundles.served import Bundle, load_bundle
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.problem import AttentionProblem

H200 = gpu("h200")


@pytest.fixture(autouse=True)
def nothing_stays_loaded() -> Any:
    yield
    bundles.loaded.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle")
    write_bundle([AttentionProblem.parse(text) for text in PROBLEMS], [gpu("a100"), H200], out)
    return out


HOSTILE = {
    "not JSON": lambda m: "kernels",
    "another schema": lambda m: json.dumps(m | {"schema": 4}),
    "a list": lambda m: json.dumps([m]),
    "deep": lambda m: "[" * 100_000,
    "no binaries": lambda m: json.dumps(m | {"binaries": []}),
    "a path upwards": lambda m: with_binary(m, file="../sm_90/x.cubin"),
    "an absolute path": lambda m: with_binary(m, file="/etc/passwd"),
    "a hidden path": lambda m: with_binary(m, file="sm_90/../../x.cubin"),
    "a source elsewhere": lambda m: with_binary(m, source="kernels/../../x.py"),
    "an invalid name": lambda m: with_binary(m, function="f; g"),
    "a strange type": lambda m: with_binary(m, arguments=[{"name": "q_ptr", "type": "void"}]),
    "a strange size": lambda m: with_binary(m, grid=[{"size": "__class__", "divisor": 1}]),
    "a divisor of 0": lambda m: with_binary(m, grid=[{"size": "batch", "divisor": 0}]),
    "too many threads": lambda m: with_binary(m, threads=4096),
    "a huge number": lambda m: with_binary(m, shared_bytes=10**40),
    "a float": lambda m: with_binary(m, registers=1.5),
    "not a number": lambda m: with_binary(m, registers=float("nan")),
    "a digest too short": lambda m: with_binary(m, sha256="abc"),
    "an invalid config": lambda m: with_binary(m, config={"block_m": 3, "block_n": 64}),
    "an unknown kernel": lambda m: with_binary(m, kernel="sort"),
    "half a family": lambda m: with_problem(m, backward=m["problems"][0]["backward"][:2]),
    "a length of 0": lambda m: with_problem(m, problem="b1 hq8 hkv2 q0 kv0 d64 bf16 causal"),
    "no notation": lambda m: with_problem(m, problem="attention"),
    "the binary of another": lambda m: with_problem(
        m, forward=[m["problems"][0]["forward"][0] | {"kernel": "fwd_streamed"}]
    ),
    "escape codes": lambda m: with_problem(m, gpu="h200\x1b[31m"),
}


def with_binary(manifest: dict[str, Any], **changes: Any) -> str:
    first, *others = manifest["binaries"]
    return json.dumps(manifest | {"binaries": [first | changes, *others]})


def with_problem(manifest: dict[str, Any], **changes: Any) -> str:
    first, *others = manifest["problems"]
    return json.dumps(manifest | {"problems": [first | changes, *others]})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused_in_a_line(name: str, folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(HOSTILE[name](manifest))
    with pytest.raises(Unsupported, match="generate the bundle again") as error:
        Bundle(tmp_path)
    assert str(error.value).isprintable()


def swapped(arguments: list[Any], i: int, j: int) -> list[Any]:
    other = list(arguments)
    other[i], other[j] = other[j], other[i]
    return other


NOT_OURS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "another tilegen": (
        lambda m, b: m["versions"].update(tilegen="0.0.1"),
        "was made by tilegen 0.0.1, and this is",
    ),
    "nobody knows whose": (lambda m, b: m["versions"].clear(), "of an unknown version"),
    "another template": (
        lambda m, b: b.update(template_digest="0" * 12),
        "its fwd was emitted from another template",
    ),
    "another mask": (
        lambda m, b: m["problems"][0].update(
            serves=m["problems"][0]["serves"].replace("causal", "full")
        ),
        "digest is that of another kernel, mask",
    ),
    "other rows": (lambda m, b: m["problems"][0].update(aligned=False), "digest is that of"),
    "another config": (
        lambda m, b: b["config"].update(num_stages=b["config"]["num_stages"] % 2 + 1),
        "digest is that of another kernel, mask, config",
    ),
    "no class": (lambda m, b: m["problems"][0].update(serves="causal"), "expected a class such as"),
    "two pointers swapped": (
        lambda m, b: b.update(arguments=swapped(b["arguments"], 0, 1)),
        r"argument 0 must be q_ptr of \*bf16, got k_ptr",
    ),
    "a float for an int": (
        lambda m, b: argument(b, "num_heads_q").update(type="fp32"),
        "must be num_heads_q of i32, got num_heads_q of fp32",
    ),
    "an int for a pointer": (
        lambda m, b: argument(b, "v_ptr").update(type="i32"),
        r"must be v_ptr of \*bf16, got v_ptr of i32",
    ),
    "a number for what a score reads": (
        lambda m, b: argument(of_score(m), "c0_ptr").update(type="i32"),
        "must be c0_ptr of a pointer, got c0_ptr of i32",
    ),
    "no last argument": (lambda m, b: b["arguments"].pop(), r"expected \d+ arguments, got \d+"),
    "one argument more": (
        lambda m, b: b["arguments"].append({"name": "scratch_2", "type": "*u8"}),
        r"expected \d+ arguments, got \d+",
    ),
    "33 threads": (lambda m, b: b.update(threads=33), "threads must be 128|256, got 33"),
    "other strides": (lambda m, b: b.update(stride_unit=1), "stride_unit must be 8, got 1"),
    "fewer programs": (lambda m, b: b["grid"][0].update(divisor=1024), "grid must be"),
    "another function": (lambda m, b: b.update(function="f"), "its source has no function f"),
    "another architecture": (
        lambda m, b: rename(m, b, b["file"].replace("sm_80", "sm_86")),
        "folder must be sm_80, got sm_86",
    ),
    "a binary for nothing": (
        lambda m, b: m["binaries"].append({**b, "file": "sm_80/x.cubin"}),
        "sm_80/x.cubin serves no problem",
    ),
}


def of_score(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the binary of a forward whose score reads a tensor."""
    forwards = (one for one in manifest["binaries"] if one["kernel"] == "fwd")
    return next(one for one in forwards if any(a["name"] == "c0_ptr" for a in one["arguments"]))


def argument(binary: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in binary["arguments"] if one["name"] == name)


def rename(manifest: dict[str, Any], binary: dict[str, Any], file: str) -> None:
    for served in manifest["problems"]:
        for own in served["forward"]:
            own["file"] = file if own["file"] == binary["file"] else own["file"]
    binary["file"] = file


@pytest.mark.parametrize("name", NOT_OURS)
def test_binaries_of_other_tilegens_are_refused_in_a_line(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = NOT_OURS[name]
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest, manifest["binaries"][0])
    copy(folder, tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr(Bundle, "damaged", lambda self: [])  # no files of other names are there
    with pytest.raises(Unsupported, match=message) as error:
        load_bundle(tmp_path)
    assert "generate the bundle again" in str(error.value)
    assert str(error.value).isprintable()
    assert bundles.loaded == []
    told = CliRunner().invoke(app, ["bundle", str(tmp_path), "--json"], catch_exceptions=False)
    assert told.exit_code == 1
    assert re.search(message, json.loads(told.stdout)["not_served"])
