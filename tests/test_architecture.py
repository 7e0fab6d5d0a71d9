"""What holds for the whole source: who may import whom, what a module must say, what must not be in it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room imports only from rooms to its left, and from itself.
ROOMS = ["config", "kvstore", "models", "scheduler", "server"]
CLIENTS = ["loadtest"]
MODULES = sorted(path.relative_to(ROOT) for room in ROOMS + CLIENTS for path in (ROOT / room).rglob("*.py"))
TEXTS = {".py", ".md", ".toml", ".lock", ".yaml", ".yml", ".cpp", ".h", ".svg", ""}
# Rooms whose import must stay quick: torch takes over a second.
WITHOUT_TORCH = ["config", "kvstore", "scheduler", "server", "loadtest"]


def name_of(module: Path) -> str:
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


def imports_of(module: Path) -> Iterator[str]:
    """Every module that `module` imports, inside functions too."""
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield node.module or ""


def test_the_rooms_are_found() -> None:
    assert {module.parts[0] for module in MODULES} == {*ROOMS, *CLIENTS}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_room_imports_only_from_rooms_to_its_left(module: Path) -> None:
    room = module.parts[0]
    allowed = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else [room]
    ours = {name.split(".")[0] for name in imports_of(module)} & {*ROOMS, *CLIENTS}
    assert ours <= set(allowed), f"{module} imports {ours - set(allowed)}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_says_what_it_is_for(module: Path) -> None:
    assert ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))


def test_no_module_name_hides_that_it_has_no_subject() -> None:
    vague = re.compile(r"utils?|helpers?|managers?|misc|common")
    assert [module for module in MODULES if vague.search(module.stem)] == []


def test_only_what_computes_imports_torch() -> None:
    names = [name_of(module) for module in MODULES if module.parts[0] in WITHOUT_TORCH]
    names += ["models.base", "models.config", "models.sampling", "models.loading.source"]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name + ' imports torch'"
    result = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def tracked_texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.suffix in TEXTS and path != Path(__file__) and path.is_file()]


@pytest.mark.parametrize(
    ("why", "pattern"),
    [
        ("a path of one person's machine", r"(?<![\w.])/(work|Users|tmp)/|/home/(?!octavo\b)"),
        ("a mark of something unfinished", r"\b(TODO|FIXME|XXX|HACK)\b"),
        ("a number that says nothing without its tracker", r"(?i)\bissue #?\d"),
        ("a file beside the repository", r"\.\./shared|\bshared/\w+\.md"),
    ],
)
def test_the_source_speaks_of_itself_alone(why: str, pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"{why}:\n" + "\n".join(found)
