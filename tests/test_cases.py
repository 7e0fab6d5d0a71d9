"""The table of situations that made other servers fail."""

from __future__ import annotations

from support.cases import DOCUMENT, document, marked, situations


def test_every_situation_is_held_by_a_test_and_every_mark_is_of_one() -> None:
    assert {case.number for case in situations()} == marked().keys()


def test_the_table_is_as_the_marks_say() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "make cases writes it"
