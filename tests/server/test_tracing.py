"""Traces, as a collector that speaks OTLP over HTTP receives them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from support.otlp import Collector, collecting

from server.tracing import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_is_one_span_with_its_phases_as_events(serving: Any, collector: Collector) -> None:
    tracer = Tracer(collector.url, "0.0")
    with serving(tracer=tracer) as server:
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = server.http.post("/v1/completions", json=body, headers=headers).json()
        server.http.get("/v1/models")
        server.assert_baseline()
    tracer.close()
    [span] = collector.spans
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"octavo"})
    assert (span.name, span.kind) == ("POST /v1/completions", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    facts = attributes(span)
    assert (facts["octavo.request_id"], facts["http.response.status_code"]) == ("mine", 200)
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 4)
    assert facts["octavo.ids"] == answer["id"]
    assert [event.name for event in span.events] == ["queue", "prefill", "decode", "finished"]
    times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano]
    assert times == sorted(times)
    assert attributes(span.events[-1])["output_tokens"] == 4


def test_an_error_marks_its_span_and_a_caller_without_a_trace_gets_one(serving: Any, collector: Collector) -> None:
    tracer = Tracer(collector.url + "/v1/traces", "0.0")
    with serving(tracer=tracer) as server:
        server.runner.broken = RuntimeError("secret detail")
        server.error(server.post(prompt="Hello"), 500)
        server.error(server.http.post("/somewhere/else", headers={"traceparent": "nonsense"}), 404)
    tracer.close()
    failed, lost = collector.spans
    assert failed.status.code == lost.status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "internal_error"
    assert len(failed.trace_id) == 16
    assert not failed.parent_span_id
    assert "secret" not in str(failed)
    assert (lost.name, attributes(lost)["error.type"]) == ("POST", "not_found")


def test_a_collector_that_is_not_there_costs_no_request(serving: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        tracer = Tracer(f"http://127.0.0.1:{nobody.getsockname()[1]}", "0.0")
        with serving(tracer=tracer) as server:
            for _ in range(3):
                server.complete("Hello", max_tokens=1)
        tracer.close()
