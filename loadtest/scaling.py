"""`make plots`: measure how the engine scales, draw it, and write the tables into `docs/performance.md`.

    python -m loadtest.scaling                     measure, then write
    python -m loadtest.scaling --quick             the same with few sizes, to try it out
    python -m loadtest.scaling --show FILE.json    write from figures that were kept

Measures through commands of the other rooms, which print JSON. Let nothing else run: it takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from loadtest.document import Content, Part, command, drawn, json_of, publish
from loadtest.plots import Axis, Series, line
from loadtest.tables import Row, table

Points = Sequence[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when it failed."""
    parser = command("plots", "Measure how the engine scales.", "docs/performance.md")
    parser.add_argument("--model", metavar="MODEL", help="the embedded default when not given")
    parser.add_argument("--weights", default="stored", metavar="FORMAT")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    return publish(parser, arguments, "scaling", _measure, parts)


def _measure(options: argparse.Namespace) -> Content:
    flags = [*([options.model] if options.model else []), "--weights", options.weights]
    flags += ["--quick"] if options.quick else []
    return json_of("scheduler.scaling") | json_of("models.scaling", *flags)


def parts(content: Content) -> list[Part]:
    """The generated part of the document."""
    ceilings, pages = content["ceilings"], content["memory"]
    milliseconds = Axis("milliseconds a step", 2)
    base = pages[0]["resident_bytes"] - pages[0]["pool_bytes"]
    return [
        f"{content['model']}, weights {content['weights']}, {content['threads']} threads,"
        f" {content['machine']['processor']}, {content['time'][:10]}. The best this machine gave:"
        f" {ceilings['bytes_read'] / 1e9:.1f} GB/s read, {ceilings['int8_operations'] / 1e9:,.0f} GOP/s in int8,"
        f" {ceilings['bfloat16_operations'] / 1e9:,.0f} in bfloat16.",
        "## Decode",
        drawn(
            "decode-batch",
            "Decode: time of a step by batch",
            Axis("sequences in the batch", 2),
            milliseconds,
            _lines(content["decode"], "context", "batch", "{} tokens"),
        ),
        drawn(
            "decode-context",
            "Decode: time of a step by context",
            Axis("tokens of context", 2),
            milliseconds,
            _lines(content["decode"], "batch", "context", "batch {}"),
        ),
        step_rows(content["decode"], ceilings),
        "## Prefill",
        drawn(
            "prefill",
            "Prefill: time to the first token by prompt length",
            Axis("tokens of prompt", 2),
            Axis("milliseconds", 2),
            [line("prompt", content["prefill"], "rows", "seconds", 1e3)],
        ),
        step_rows(content["prefill"], ceilings),
        "## Memory",
        drawn(
            "memory",
            "Resident memory by pages of the KV pool, all written",
            Axis("pages"),
            Axis("MiB"),
            [
                line("resident", pages, "pages", "resident_bytes", 2**-20),
                line("pool alone", pages, "pages", "pool_bytes", 2**-20),
                Series("without pool", [(point["pages"], base / 2**20) for point in pages], dashed=True),
            ],
        ),
        memory_rows(pages),
        "## Scheduler",
        drawn(
            "scheduler",
            "Scheduler: cost of a token by running requests",
            Axis("running requests", 2),
            Axis("microseconds a token", 2),
            [line(name, content["scheduler"], "running", name) for name in ("plan", "apply", "other")],
        ),
        scheduler_rows(content["scheduler"]),
    ]


def _lines(points: Points, each: str, along: str, name: str) -> list[Series]:
    """A line for every value of `each` that has at least four points."""
    values = sorted({point[each] for point in points})
    lines = [
        line(name.format(value), [p for p in points if p[each] == value], along, "seconds", 1e3) for value in values
    ]
    return [one for one in lines if len(one.points) > 3]


def step_rows(points: Points, ceilings: dict[str, float]) -> list[Row]:
    """Each kind of step with what it achieved of the machine's best. Operations are held against int8."""
    found = []
    for point in points:
        read, operations = (point[name] / point["seconds"] for name in ("bytes_read", "operations"))
        shares = {"r": read / ceilings["bytes_read"], "o": operations / ceilings["int8_operations"]}
        rates = {"ms": point["seconds"] * 1e3, "rate": point["rows"] / point["seconds"]}
        found.append(point | shares | rates | {"gb": read / 1e9, "gop": operations / 1e9})
    return table(
        "sequences | context | ms | tokens/s | GB/s | of the best | GOP/s | of the best",
        "{batch} | {context:,} | {ms:.2f} | {rate:,.0f} | {gb:.1f} | {r:.0%} | {gop:,.0f} | {o:.0%}",
        found,
    )


def memory_rows(points: Points) -> list[Row]:
    """Pool and process by pages."""
    mib = [{"pages": p["pages"], "pool": p["pool_bytes"] / 2**20, "all": p["resident_bytes"] / 2**20} for p in points]
    return table(
        "pages | pool MiB | process MiB | difference MiB",
        "{pages:,} | {pool:,.0f} | {all:,.0f} | {rest:,.0f}",
        [row | {"rest": row["all"] - row["pool"]} for row in mib],
    )


def scheduler_rows(points: Points) -> list[Row]:
    """Microseconds a token."""
    return table(
        "running | plan us | apply us | other us | together us",
        "{running} | {plan:.1f} | {apply:.1f} | {other:.1f} | {all:.1f}",
        [point | {"all": point["plan"] + point["apply"] + point["other"]} for point in points],
    )


if __name__ == "__main__":
    sys.exit(main())
