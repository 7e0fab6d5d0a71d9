from __future__ import annotations

import io
import sys
import time

import pytest

from models.loading import converted_tokenizer
from models.loading.converted_tokenizer import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_on_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest sets its own stderr between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Working"):
        pass
    assert capsys.readouterr() == ("", "")


def test_work_that_is_done_at_once_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_on_stderr(monkeypatch)
    with progress("Working"):
        pass
    assert "Working" not in terminal.getvalue()


def test_work_that_takes_long_shows_a_bar_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_on_stderr(monkeypatch)
    monkeypatch.setattr(converted_tokenizer, "DELAY_SECONDS", 0.01)
    with progress("Working"):
        deadline = time.monotonic() + 10
        while "Working" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "Working" in terminal.getvalue()
    after = terminal.getvalue()
    assert after.endswith("\x1b[2K")  # the line is erased


def test_an_error_inside_passes_through_and_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_on_stderr(monkeypatch)
    with pytest.raises(KeyError), progress("Working"):
        raise KeyError("x")
    assert "Working" not in terminal.getvalue()
