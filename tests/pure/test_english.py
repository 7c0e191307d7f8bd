"""The rules of English that a program can see: names, docstrings, phrases, and lines of pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = ["benchmarks/**/*.py", "tests/**/*.py", "tilegen/**/*.py"]
"""Python files, as patterns."""

PAGES = [
    "*.md",
    "benchmarks/*.md",
    "benchmarks/results/{h200,published}/README.md",
    "cache/*.md",
    "templates/*.md",
    "tests/**/*.md",
    "tilegen/*.md",
    "tilegen/{bundles,calls,choose,cli,cpu,emit,explaining,kernels,masks,model,runtime,store,theory,tuning}/*.md",
    "tilegen/integrations/**/*.md",
]
"""Pages whose lines of prose fit WIDTH, as patterns."""

WIDTH = 100
VAGUE_NAMES = {"one", "found", "its"}
VAGUE_PHRASES = (
    *("in vain", "made alike", "hangs on", "what is none", "that is none", "said of", "is told"),
    *("nobody says", "who asks", "what it gives", "is no number", "what of", "what lies"),
)
HIDDEN_RESULT = re.compile(r"(?:Return|Yield|Whether) what\b")


def files(patterns: list[str]) -> list[Path]:
    """Expand patterns, with alternatives in braces, to the files of the repository."""
    plain: list[str] = []
    for pattern in patterns:
        head, brace, rest = pattern.partition("{")
        middle, _, tail = rest.partition("}")
        plain += [head + part + tail for part in middle.split(",")] if brace else [pattern]
    return sorted({path for pattern in plain for path in ROOT.glob(pattern)})


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of docstrings of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)  # of a lambda it is an expression
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of variables and parameters, without those of comprehensions and
    lambdas, and without fields of classes."""
    exempt: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            exempt.update(id(name) for name in ast.walk(node.target))
        elif isinstance(node, ast.Lambda):
            exempt.update(id(name) for name in ast.walk(node.args))
        elif isinstance(node, ast.ClassDef):
            fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            exempt.update(id(field) for field in fields)
    for node in ast.walk(tree):
        if id(node) in exempt:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each rule that a Python file breaks."""
    text = path.read_text(encoding="utf-8")
    tree, name = ast.parse(text), path.relative_to(ROOT)
    for line, docstring in docstrings(tree):
        if HIDDEN_RESULT.match(docstring):
            yield f"{name}:{line}: {docstring.split('.')[0]!r} hides its result; name the noun"
    for line, variable in bound_names(tree):
        if variable in VAGUE_NAMES:
            yield f"{name}:{line}: a variable called {variable!r}; call it by its noun"
    if path == Path(__file__):
        return
    prose = re.sub(r"\s*\n\s*(?:# |f?\")?", " ", text)  # phrases may go on in the next line
    for phrase in VAGUE_PHRASES:
        if re.search(rf"\b{phrase}\b", prose):
            yield f"{name}: {phrase!r}; say it with a noun and a verb"


def long_lines(path: Path) -> Iterator[str]:
    """Yield the places of lines of prose beyond WIDTH; tables, code and lines that are a single
    link or figure may be longer."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_link = re.fullmatch(r"\s*(?:[-*] )?[(]?!?\[[^\]]*\]\([^)]*\)[).,]*", line)
        if not is_code and not is_link and not line.startswith(("|", "    ")) and len(line) > WIDTH:
            yield f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"


@pytest.mark.parametrize("pattern", CODE)
def test_names_and_docstrings_are_plain(pattern: str) -> None:
    paths = files([pattern])
    assert paths, "no such files"
    assert not [fault for path in paths for fault in faults(path)]


@pytest.mark.parametrize("pattern", PAGES)
def test_lines_of_pages_fit(pattern: str) -> None:
    paths = files([pattern])
    assert paths, "no such pages"
    assert not [place for path in paths for place in long_lines(path)]


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule finds its fault, and the exempt forms pass."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file, page = tmp_path / "module.py", tmp_path / "page.md"
    for text, expected in (
        ('"""Return what is loaded."""', "hides its result"),
        ('def f() -> int:\n    """Whether what is there fits."""\n', "hides its result"),
        ("def f(one: int) -> int:\n    return one\n", "'one'"),
        ("for found in ():\n    pass\n", "'found'"),
        ("# The sum of weights in\n# vain is dropped.\n", "'in vain'"),
        ("sizes = [one.size for one in ()]\n", ""),
        ("key = lambda one: one.size\n", ""),
        ("class Check:\n    found: float = 0.0\n", ""),
        ('"""Return the size."""', ""),
    ):
        file.write_text(text)
        seen = list(faults(file))
        assert len(seen) == bool(expected)
        assert expected in "".join(seen)
    long = "x " * 60
    for text, is_fault in ((long, True), (f"| {long}", False), (f"```\n{long}\n```", False)):
        page.write_text(text)
        assert bool(list(long_lines(page))) == is_fault
