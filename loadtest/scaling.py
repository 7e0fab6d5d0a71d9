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

from loadtest.document import Content, command, image, json_of, publish
from loadtest.plots import Axis, Series, chart
from loadtest.tables import Row, markdown

Points = Sequence[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when it failed."""
    parser = command("plots", "Measure how the engine scales.", "docs/performance.md")
    parser.add_argument("--model", metavar="MODEL", help="the embedded default when not given")
    parser.add_argument("--weights", default="stored", metavar="FORMAT")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    return publish(parser, arguments, "scaling", _measure, charts, body)


def _measure(options: argparse.Namespace) -> Content:
    flags = [*([options.model] if options.model else []), "--weights", options.weights]
    flags += ["--quick"] if options.quick else []
    return json_of("scheduler.scaling") | json_of("models.scaling", *flags)


def charts(content: Content) -> dict[str, str]:
    """SVG documents by name."""
    decode, prefill = content["decode"], content["prefill"]
    batch, context = Axis("sequences in the batch", 2), Axis("tokens of context", 2)
    milliseconds = Axis("milliseconds a step", 2)
    pages = content["memory"]
    scheduler = content["scheduler"]
    base = pages[0]["resident_bytes"] - pages[0]["pool_bytes"]
    return {
        "decode-batch": chart(
            "Decode: time of a step by batch", batch, milliseconds, _lines(decode, "context", "batch", "{} tokens")
        ),
        "decode-context": chart(
            "Decode: time of a step by context", context, milliseconds, _lines(decode, "batch", "context", "batch {}")
        ),
        "prefill": chart(
            "Prefill: time to the first token by prompt length",
            Axis("tokens of prompt", 2),
            Axis("milliseconds", 2),
            [Series("prompt", [(point["rows"], point["seconds"] * 1e3) for point in prefill])],
        ),
        "memory": chart(
            "Resident memory by pages of the KV pool, all written",
            Axis("pages"),
            Axis("MiB"),
            [
                Series("resident", [(point["pages"], point["resident_bytes"] / 2**20) for point in pages]),
                Series("pool alone", [(point["pages"], point["pool_bytes"] / 2**20) for point in pages]),
                Series("without pool", [(point["pages"], base / 2**20) for point in pages], dashed=True),
            ],
        ),
        "scheduler": chart(
            "Scheduler: cost of a token by running requests",
            Axis("running requests", 2),
            Axis("microseconds a token", 2),
            [
                Series(name, [(point["running"], point[name]) for point in scheduler])
                for name in ("plan", "apply", "other")
            ],
        ),
    }


def _lines(points: Points, each: str, along: str, name: str) -> list[Series]:
    """A line for every value of `each` that has at least four points."""
    values = sorted({point[each] for point in points})
    lines = [
        Series(name.format(value), [(p[along], p["seconds"] * 1e3) for p in points if p[each] == value])
        for value in values
    ]
    return [line for line in lines if len(line.points) > 3]


def body(content: Content) -> str:
    """The generated part of the document."""
    machine, ceilings = content["machine"], content["ceilings"]
    best = f"{ceilings['bytes_read'] / 1e9:.1f} GB/s read, {ceilings['int8_operations'] / 1e9:,.0f} GOP/s in int8"
    about = (
        f"{content['model']}, weights {content['weights']}, {content['threads']} threads, {machine['processor']},"
        f" {content['time'][:10]}. The best this machine gave: {best},"
        f" {ceilings['bfloat16_operations'] / 1e9:,.0f} in bfloat16."
    )
    parts = [
        about,
        "## Decode",
        image("decode-batch"),
        image("decode-context"),
        markdown(step_rows(content["decode"], ceilings)),
        "## Prefill",
        image("prefill"),
        markdown(step_rows(content["prefill"], ceilings)),
        "## Memory",
        image("memory"),
        markdown(memory_rows(content["memory"])),
        "## Scheduler",
        image("scheduler"),
        markdown(scheduler_rows(content["scheduler"])),
    ]
    return "\n\n".join(parts) + "\n"


def step_rows(points: Points, ceilings: dict[str, float]) -> list[Row]:
    """Each kind of step with what it achieved of the machine's best. Operations are held against int8."""
    rows: list[Row] = [("sequences", "context", "ms", "tokens/s", "GB/s", "of the best", "GOP/s", "of the best")]
    for point in points:
        read, operations = (point[name] / point["seconds"] for name in ("bytes_read", "operations"))
        rows.append(
            (
                str(point["batch"]),
                f"{point['context']:,}",
                f"{point['seconds'] * 1e3:.2f}",
                f"{point['rows'] / point['seconds']:,.0f}",
                f"{read / 1e9:.1f}",
                f"{read / ceilings['bytes_read']:.0%}",
                f"{operations / 1e9:,.0f}",
                f"{operations / ceilings['int8_operations']:.0%}",
            )
        )
    return rows


def memory_rows(points: Points) -> list[Row]:
    """Pool and process by pages."""
    rows: list[Row] = [("pages", "pool MiB", "process MiB", "difference MiB")]
    for point in points:
        pool, resident = point["pool_bytes"] / 2**20, point["resident_bytes"] / 2**20
        rows.append((f"{point['pages']:,}", f"{pool:,.0f}", f"{resident:,.0f}", f"{resident - pool:,.0f}"))
    return rows


def scheduler_rows(points: Points) -> list[Row]:
    """Microseconds a token."""
    rows: list[Row] = [("running", "plan us", "apply us", "other us", "together us")]
    for point in points:
        parts = [point[name] for name in ("plan", "apply", "other")]
        rows.append((str(point["running"]), *(f"{part:.1f}" for part in (*parts, sum(parts)))))
    return rows


if __name__ == "__main__":
    sys.exit(main())
