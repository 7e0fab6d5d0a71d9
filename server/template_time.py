"""How long a chat template may take: a look at the clock in every round of its loops and at every call it makes.

What runs for ever in Jinja does so in loops and calls; a single operation is as long as its operands. Owned by
whichever thread renders. Imports Jinja, which is not wanted before the first chat.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # of a processor, so that a busy machine refuses nothing

_ends: ContextVar[float] = ContextVar("ends", default=float("inf"))  # by the thread's own clock


@contextmanager
def limited() -> Iterator[None]:
    """What is rendered inside raises TemplateRuntimeError when it takes longer."""
    token = _ends.set(time.thread_time() + SECONDS)
    try:
        yield
    finally:
        _ends.reset(token)


def _look() -> None:
    if time.thread_time() > _ends.get():
        raise TemplateRuntimeError(f"it takes longer than {SECONDS:g} seconds")


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _look()
        yield item


class _TimedCode(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        for loop in node.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "timed", [], [], None, None, lineno=loop.lineno)
        super().visit_Template(node, frame)


class TimedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the clock in view."""

    code_generator_class = _TimedCode

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.filters["timed"] = _timed

    def call(self, *arguments: Any, **named: Any) -> Any:
        _look()
        return super().call(*arguments, **named)
