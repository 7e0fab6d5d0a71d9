"""The table in docs/cases.md: situations that made other servers fail, and the tests that hold them here.

    python tests/support/cases.py       write it; exit code 1 when a situation has no test

A test names what it holds by `@pytest.mark.case(3, 17)`. The situations are in tests/data/cases.tsv.
"""

from __future__ import annotations

import ast
import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITUATIONS = ROOT / "tests/data/cases.tsv"
DOCUMENT = ROOT / "docs/cases.md"
# What a kind's last number is.
KINDS = {23: "crash, or wrong data", 53: "hang, leak or outage", 84: "wrong result", 95: "compatibility"}
HEAD = """# What made other servers fail

Each of these was reported of some server that does what Octavo does. Tests here show what happens instead: `make cases`
runs them, and writes this table from their marks (`@pytest.mark.case(...)`).

| | what was seen | kind | held by |
|---:|---|---|---|
"""


@dataclass(frozen=True)
class Situation:
    number: int
    report: str  # owner/repository#number
    title: str

    @property
    def kind(self) -> str:
        return next(kind for last, kind in KINDS.items() if self.number <= last)

    @property
    def link(self) -> str:
        repository, number = self.report.split("#")
        return f"https://github.com/{repository}/issues/{number}"


def situations() -> list[Situation]:
    with SITUATIONS.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Situation(int(number), report, title) for number, report, title in rows]


def marked() -> dict[int, list[tuple[Path, str]]]:
    """By number: the tests that hold it, in the order of files."""
    found: dict[int, list[tuple[Path, str]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.case":
                    for argument in decorator.args:
                        found[ast.literal_eval(argument)].append((path.relative_to(ROOT), node.name))
    return found


def document() -> str:
    held = marked()
    lines = []
    for case in situations():
        sentences = [(name.removeprefix("test_").replace("_", " "), path) for path, name in held[case.number]]
        tests = "<br>".join(f"[{sentence}](../{path.as_posix()})" for sentence, path in sentences) or "nothing"
        lines.append(f"| {case.number} | [{case.title}]({case.link}) | {case.kind} | {tests} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    DOCUMENT.write_text(document(), encoding="utf-8")
    missing = sorted({case.number for case in situations()} - marked().keys())
    if missing:
        print(f"held by no test: {', '.join(map(str, missing))}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
