"""Storages by their URLs: of other kinds, away, not there, and never made by looking."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.fleet import storage as storages
from tilegen.fleet.storage import StorageAway, open_storage, patiently


@pytest.mark.parametrize("form", ["journal:{}", "sqlite:///{}", "sqlite:///{}?timeout=9"])
def test_reading_a_storage_does_not_create_it(form: str, tmp_path: Path) -> None:
    """Its file's name may be misspelt, or its folder not mounted."""
    file = tmp_path / "folder" / "trials"
    told = CliRunner().invoke(app, ["fleet", "status", "--storage", form.format(file)])
    assert isinstance(told.exception, Unsupported)
    assert "has no file" in str(told.exception)
    assert list(tmp_path.iterdir()) == []
    file.parent.mkdir()
    open_storage(form.format(file))
    assert CliRunner().invoke(app, ["fleet", "status", "--storage", form.format(file)]).stdout


@pytest.mark.parametrize("url", ["redis://host", "journal:", "grpc://host", "postgresql:db", "x"])
def test_a_storage_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(Unsupported, match="storage must be postgresql://"):
        open_storage(url)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(Unsupported, match="got 'redis://me@db:5432/x'"):
        open_storage("redis://me:secret@db:5432/x")


def test_an_unreachable_storage_is_retried_but_not_for_ever() -> None:
    answers: list[Exception | int] = [OSError("refused"), OSError("refused"), 7]

    def call() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(call, "db", 5.0) == 7
    answers += [OSError("refused")] * 9
    with pytest.raises(StorageAway, match="the storage db has not answered for 0 s: refused"):
        patiently(call, "db", 0.05)
    answers[:] = [ValueError("ours")]
    with pytest.raises(ValueError, match="ours"):
        patiently(call, "db", 5.0)


def test_a_database_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr(storages, "OPENING_SECONDS", 0.3)
    with pytest.raises(
        StorageAway, match=r"postgresql://me@127\.0\.0\.1:1/x has not answered"
    ) as caught:
        open_storage("postgresql://me:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)
