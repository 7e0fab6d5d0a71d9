"""Jinja as authors of chat templates know it: the names and the layout that transformers' `apply_chat_template` gives
them, in Jinja's sandbox and on a clock.

A template came with a model and is not trusted: what it sees is plain data, and it is looked after in every round of
its loops and at every call it makes. What runs for ever in Jinja does so in loops and calls; a single operation is as
long as its operands. Owned by whichever thread renders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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


class _Generation(Extension):
    """`{% generation %}` around what the model is to say, which matters in training only."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict`, without the type."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace`, without names that Python keeps for itself."""

    def __init__(*arguments: Any, **named: Any) -> None:  # so that "self" may be one of the names
        own, *arguments = arguments  # type: ignore[assignment]
        attributes = dict(*arguments, **named)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no names that begin with an underscore, as {name!r} does")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As Python writes it: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with these names, and the clock in view."""

    code_generator_class = _TimedCode

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters |= {"timed": _timed, "tojson": _tojson}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]  # one call writes as much as it is asked for, and no clock is looked at meanwhile

    def call(self, /, *arguments: Any, **named: Any) -> Any:
        _look()
        return super().call(*arguments, **named)
