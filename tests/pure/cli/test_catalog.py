"""Files that list problems."""

from pathlib import Path

import pytest

from tilegen.catalog import read_catalogue
from tilegen.errors import InvalidProblem, Unsupported


def test_text_has_one_notation_a_line(tmp_path: Path) -> None:
    file = tmp_path / "models.txt"
    file.write_text("# ours\nhq8 q128 d64 bf16 causal  # small\n\n  hq8 q128 d64 fp16\n")
    assert [problem.dtype for problem in read_catalogue(file)] == ["bf16", "fp16"]
    file.write_text("hq8 q128 d64 bf16\nhq8 q128 d64\n")
    with pytest.raises(InvalidProblem, match=r"models\.txt, line 2: .*no dtype"):
        read_catalogue(file)
    file.write_text("# nothing\n")
    with pytest.raises(InvalidProblem, match="at least one problem"):
        read_catalogue(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Unsupported, match="cannot read"):
        read_catalogue(file)


def test_yaml_has_notations_under_names(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "llama:\n  - hq8 q128 d64 bf16 causal\n  - hq8 q256 d64 bf16 causal\n"
        "others: {vit: hq8 q128 d64 fp16, empty:, again: [hq8 q128 d64 bf16 causal]}\n"
    )
    assert [(p.seqlen_q, p.dtype) for p in read_catalogue(file)] == [
        (128, "bf16"),
        (256, "bf16"),
        (128, "fp16"),
    ]
    file.write_text("- hq8 q128 d64 bf16\n")
    assert len(read_catalogue(file)) == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("llama:\n  - hq8 q128\n", r"models\.yaml, llama\[0\]: expected a problem"),
        ("llama: 8\n", r"models\.yaml, llama: expected the notation of a problem, got int"),
        ("a: [\n", "expected YAML in .*found something else"),
        ("!!python/object/apply:os.getcwd []", "expected YAML in .*found something else"),
        ("[" * 3000, "expected YAML in .*found something else"),
        ("", "at least one problem"),
    ],
)
def test_other_yaml_is_refused_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(InvalidProblem, match=message) as error:
        read_catalogue(file)
    assert "\n" not in str(error.value)
