"""API keys: those of the command line, and the named ones of a file that is read again while the daemon runs.

The file is YAML, a list with an entry for each key:

    - {name: alice, sha256: 9f86…, max_concurrent: 8, requests_per_minute: 60, tokens_per_minute: 40000}
    - {name: ops, sha256: 60303…, admin: true}

Only digests are kept, here and there. SHA-256 is enough for them: a key is 256 random bits, made by `octavo keys new`,
that nobody can guess; a slow hash protects what people choose themselves, and would cost every request its time.

`reload` may be called from any thread; it replaces what is read by others in one assignment.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from config.errors import ConfigError
from server.errors import in_our_words

PREFIX = "ok-"  # so that a key which got into a log or a repository is recognised as one
_Positive = Field(default=None, gt=0)


class Key(BaseModel):
    """One key. Limits are per minute, refilled steadily; None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@+-]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    max_concurrent: int | None = _Positive  # choices that have not ended
    requests_per_minute: int | None = _Positive  # choices counted one by one
    tokens_per_minute: int | None = _Positive  # of prompts and answers

    @property
    def id(self) -> str:
        """What the rest of the server calls the key: it does not give it away, and changes when the key does."""
        return self.sha256[:16]


_FILE = TypeAdapter(list[Key] | None)
_LIKE = "`- {name: alice, sha256: ...}`, as `octavo keys new` writes it"


class KeyRing:
    """All keys. While there are none and no file for them, everybody may use the server."""

    def __init__(self, keys: Sequence[str] = (), admin_keys: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises ConfigError for a file that cannot be used."""
        given = [(key, False) for key in keys] + [(key, True) for key in admin_keys]
        self._given = [
            Key(name=f"key-{number}", sha256=digest(key), admin=admin) for number, (key, admin) in enumerate(given, 1)
        ]
        self._file = file
        self._keys: list[Key] = []
        self._by_id: dict[str, Key] = {}
        self.reload()

    @property
    def closed(self) -> bool:
        """Whether a key is needed."""
        return self._file is not None or any(not key.admin for key in self._given)

    @property
    def has_admins(self) -> bool:
        return any(key.admin for key in self._keys)

    def reload(self) -> int:
        """Read the file again; how many keys there are now. Raises ConfigError, and then all stays as it was."""
        keys = self._given + ([] if self._file is None else read(self._file))
        self._by_id = {key.id: key for key in keys}
        self._keys = keys
        return len(keys)

    def find(self, key: bytes) -> Key | None:
        """The key that was presented, if it is one."""
        presented, found = hashlib.sha256(key).hexdigest(), None
        for known in self._keys:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(known.sha256, presented):
                found = known
        return found

    def by_id(self, key_id: str) -> Key | None:
        return self._by_id.get(key_id)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def generate() -> str:
    """A new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def read(path: Path, flag: str = "--api-key-file") -> list[Key]:
    """The keys in a file that `flag` names. Raises ConfigError with one line that names the entry."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    return parse(content, f"{flag} {path}")


def parse(content: bytes, source: str) -> list[Key]:
    """The keys in what a file holds. Raises as `read` does."""
    try:
        keys = _FILE.validate_python(yaml.safe_load(content.decode())) or []
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"entry {where} {in_our_words(first['msg'])}" if where else f"must be a list of keys, like {_LIKE}"
        raise ConfigError(f"{source}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # its text stays out of logs
        raise ConfigError(f"{source}: is not YAML: it must be a list of keys, like {_LIKE}") from None
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"{source}: the {field} {twice[:64]} is there twice")
    return keys
