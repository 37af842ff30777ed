"""Spans of a draft server: one for each control call, and one for each step whose client asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import INVALID_SPAN, NoOpTracerProvider, Span, SpanKind, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SHUTDOWN_S = 2.0
TRACER_NAME = "agentspec.sidecar"
OK = grpc.StatusCode.OK

_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans; the default makes none and costs nothing.

    A span belongs to the trace of the `traceparent` that came with it: a control call's in the metadata, a step's in
    its field. A step without one has no span: at thousands of steps per second only its client can choose. Spans hold
    counts and codes, never tokens or tags.

    Args:
        provider: exports the spans; None: nobody does.
        give_up: makes an export that is under way fail.
    """

    def __init__(self, provider: TracerProvider | None = None, give_up: Callable[[], None] = lambda: None) -> None:
        self._provider = provider
        self._give_up = give_up
        self._tracer: Tracer = (provider or NoOpTracerProvider()).get_tracer(TRACER_NAME)

    @classmethod
    def to_collector(cls, endpoint: str, resource: Resource) -> Tracing:
        """Spans for a collector; OpenTelemetry's variables `OTEL_EXPORTER_OTLP_*`, `OTEL_BSP_*`, `OTEL_TRACES_*` count.

        Args:
            endpoint: URL of its gRPC port.
            resource: who sends.
        """
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415  # imports grpc, 0.2 s
            OTLPSpanExporter,
        )

        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, exporter.shutdown)

    def shutdown(self) -> None:
        """Send what is left; a dead collector is waited for two seconds."""
        if self._provider is None:
            return
        timer = threading.Timer(SHUTDOWN_S, self._give_up)
        timer.start()
        self._provider.shutdown()
        timer.cancel()
        timer.join()

    @contextmanager
    def call(self, method: str, metadata: Mapping[str, str]) -> Iterator[None]:
        """A span around a control call.

        Args:
            method: full name, as in ``/agentspec.draft.v1.DraftService/Draft``.
            metadata: of the call.
        """
        service, _, name = method.strip("/").rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        with self._tracer.start_as_current_span(
            method.strip("/"),
            _W3C.extract(metadata),
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ):
            yield

    @contextmanager
    def step(self, traceparent: str, num_rows: int) -> Iterator[Span]:
        """A span around a step that its client sampled; without a valid traceparent there is none."""
        context = _W3C.extract({"traceparent": traceparent}) if traceparent else None
        if context is None or not get_current_span(context).get_span_context().is_valid:
            yield INVALID_SPAN
            return
        with self._tracer.start_as_current_span(
            "agentspec.draft_step",
            context,
            SpanKind.SERVER,
            {"agentspec.num_rows": num_rows},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span


def note_code(code: grpc.StatusCode) -> None:
    """Write the status with which a call ends on its span."""
    get_current_span().set_attribute("rpc.grpc.status_code", code.value[0])
