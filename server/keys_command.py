"""`octavo keys`: make a key for somebody and add its digest to a file, or list whose keys are in it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import yaml

from config.errors import ConfigError
from server.keys import Key, digest, generate, parse, read

_LIMITS = ("max_concurrent", "requests_per_minute", "tokens_per_minute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key, print it once and add its digest to the file")
    new.add_argument("name", metavar="NAME", help="whose it is")
    new.add_argument("--admin", action="store_true", help="let it administer the server")
    for limit in _LIMITS:
        new.add_argument("--" + limit.replace("_", "-"), type=int, metavar="N", help="a limit; none when not given")
    listing = actions.add_parser("list", help="show names and limits")
    for action in (new, listing):
        action.add_argument("--file", type=Path, required=True, help="what --api-key-file is given")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    path: Path = options.file
    keys = read(path, "--file") if path.exists() or options.action == "list" else []
    if options.action == "list":
        for key in keys:
            shown = key.model_dump(exclude_none=True, exclude={"sha256"})
            print(yaml.safe_dump(shown, default_flow_style=True, sort_keys=False).strip())
        return 0
    secret = generate()
    fields = {limit: getattr(options, limit) for limit in _LIMITS} | {"admin": options.admin}
    given = {name: value for name, value in fields.items() if value is not None and value is not False}
    try:
        key = Key(name=options.name, sha256=digest(secret), **given)
    except ValueError:
        raise ConfigError("a name has letters, digits and . @ + - _, limits are positive") from None
    if any(other.name == key.name for other in keys):
        raise ConfigError(f"{path} has a key of that name: take its line out first")
    try:
        _append(path, key, [*keys, key])
    except OSError as error:
        raise ConfigError(f"--file {path}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    print(secret)
    return 0


def _append(path: Path, key: Key, expected: list[Key]) -> None:
    """Add a line, so that comments and order stay. Raises OSError, or ConfigError where a line would spoil the file."""
    entry = key.model_dump(exclude_unset=True)
    line = "- " + yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10_000)
    before = path.read_bytes() if path.exists() else b""
    added = (b"\n" if before and not before.endswith(b"\n") else b"") + line.encode()
    try:
        fits = parse(before + added, str(path)) == expected
    except ConfigError:
        fits = False
    if not fits:
        raise ConfigError(f"--file {path}: no line can be added to it: begin each key with `- ` at the start of a line")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:  # its owner's alone
        file.write(added)
