"""The command line's flags, made from the fields of `Settings`.

Values stay strings here: `Settings` parses and validates them, whichever source they come from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn, cast, get_args, get_origin

from config.errors import ConfigError
from config.settings import Settings, flag_of, suggest
from config.sizes import format_size


class Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is one ConfigError instead of a usage message."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for every setting, in the groups and the order in which they are defined."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in Settings.model_fields.items():
        shown = cast("dict[str, str]", field.json_schema_extra)
        group = groups.get(shown["group"]) or groups.setdefault(
            shown["group"], parser.add_argument_group(shown["group"])
        )
        metavar, text = shown["metavar"], (field.description or "").replace("%", "%%")
        if field.default not in (None, ()):
            text = f"{text} [{_written(field.default, metavar)}]"
        options: dict[str, Any] = {"metavar": metavar}
        if name == "model":
            options["nargs"] = "?"
        elif field.annotation is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.annotation) is tuple:
            options |= {"nargs": "+", "action": _Several}
        elif metavar is None:
            options["metavar"] = "{" + ",".join(get_args(field.annotation)) + "}"
        flag = name if name == "model" else flag_of(name)
        group.add_argument(flag, default=argparse.SUPPRESS, help=text, **options)


class _Several(argparse._ExtendAction):
    """A flag that takes every value after it. A model among them would become a key that opens the server."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) > 1 and Path(values[-1]).exists():
            parser.error(f"{option_string} takes every value after it: put MODEL {values[-1]} before it")
        super().__call__(parser, namespace, values, option_string)


def refuse_unknown(arguments: list[str]) -> None:
    """Raise ConfigError for the first of the arguments that no flag took."""
    if not arguments:
        return
    flag = next((argument for argument in arguments if argument.startswith("-")), None)
    if flag is None:
        raise ConfigError(f"unexpected argument {arguments[0]!r}: one MODEL at most")
    name = flag.split("=", 1)[0]
    meant = suggest(name.removeprefix("--no-"))
    hint = f"did you mean {flag_of(meant)}?" if meant else "`octavo serve --help` lists the flags"
    raise ConfigError(f"unknown flag {name}: {hint}")


def _written(default: object, metavar: str | None) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int) and metavar == "SIZE":
        return format_size(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
