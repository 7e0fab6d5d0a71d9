"""OpenTelemetry traces (`--otlp-endpoint`): one span for each request that generates, under its caller's trace if it
names one (`traceparent`). The span's events are the request's life in the engine.

Spans are made when a request is over, from what was noted anyway, so that nothing is traced while tokens are made. The
SDK sends them in batches from a thread of its own and drops what nobody takes; it is imported only when traces are
asked for, and the rest is set by its own variables, such as `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_TRACES_SAMPLER`.
"""

from __future__ import annotations

import logging
import time
from importlib.util import find_spec
from urllib.parse import urlsplit

from config.errors import ConfigError
from server.exchange import Exchange

TIMEOUT_SECONDS = 3.0  # to send a batch, attempts together; what is not taken by then is dropped
_EVENTS = {"queued": "queue", "admitted": "prefill", "first token": "decode"}  # where a phase begins
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")


def check_sdk() -> None:
    """Raises ConfigError where the packages are missing, without importing them."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError("--otlp-endpoint needs OpenTelemetry's SDK: pip install 'octavo[tracing]'")


class Tracer:
    """Sends spans to the collector at `endpoint`, such as http://localhost:4318."""

    def __init__(self, endpoint: str, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "octavo", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=TIMEOUT_SECONDS)))
        self._tracer = self._provider.get_tracer("octavo", version)
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # one line for a lost batch, not one an attempt
        self._propagator = TraceContextTextMapPropagator()

    def record(self, exchange: Exchange) -> None:
        """The span of a request that is over."""
        from opentelemetry.trace import SpanKind, StatusCode

        scope, moment, wall = exchange.scope, time.monotonic(), time.time_ns()

        def at(when: float) -> int:
            return wall - int((moment - when) * 1e9)

        route = getattr(scope.get("route"), "path", "")
        attributes = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": exchange.status,
            "error.type": exchange.error,
            "octavo.request_id": exchange.request_id,
            "gen_ai.usage.input_tokens": exchange.generation.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": exchange.generation.get("output_tokens"),
        }
        attributes |= {f"octavo.{name}": value for name, value in exchange.generation.items()}
        headers = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT_HEADERS
        }
        span = self._tracer.start_span(
            f"{scope['method']} {route}".rstrip(),
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=at(exchange.began),
        )
        for life in exchange.lives:
            for event in life.events:
                detail = {"request": life.id, "choice": event.choice, **event.detail}
                span.add_event(_EVENTS.get(event.kind, event.kind), detail, at(event.time))
        if exchange.error is not None:
            span.set_status(StatusCode.ERROR, exchange.error)
        span.end(wall)

    def close(self) -> None:
        """Send what is left; takes some seconds when the collector does not answer."""
        self._provider.shutdown()
