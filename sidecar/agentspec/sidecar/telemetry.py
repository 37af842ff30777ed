"""Metrics of one draft engine, for Prometheus and by OTLP, read from its own counts: the hot path never sees them."""

from __future__ import annotations

import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from wsgiref.simple_server import WSGIServer
from wsgiref.types import WSGIApplication

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app, start_http_server

from agentspec.sidecar.budget import BudgetStats, Policy
from agentspec.sidecar.budget_metrics import register_budget
from agentspec.sidecar.engine import BlockStats
from agentspec.sidecar.policy_switch import with_policy_switch

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

METER_NAME = "agentspec"
SHUTDOWN_MS = 2000

BLOCK_COUNTERS = {
    "agentspec_steps": ("num_steps", "Verification steps of one request (request-steps)."),
    "agentspec_drafts": ("num_drafts", "Request-steps that verified a draft."),
    "agentspec_draft_tokens": ("num_draft_tokens", "Draft tokens that the target model verified."),
    "agentspec_accepted_tokens": ("num_accepted_tokens", "Draft tokens that the target model accepted."),
    "agentspec_tokens": ("num_tokens", "Output tokens, accepted draft tokens included."),
}
"""Field of `BlockStats` and description by metric; Prometheus adds ``_total`` to a counter's name."""


class MeasuredEngine(Protocol):
    """What the metrics read of a draft engine; all of it is cheap and thread-safe."""

    def stats(self) -> Sequence[BlockStats]:
        """Counts by namespace, workflow, stage and block."""
        ...

    def num_open_requests(self) -> int:
        """Requests that were opened and not closed."""
        ...

    def num_history_tokens(self) -> int:
        """Output tokens that can be drafted from."""
        ...

    def memory_bytes(self) -> int:
        """Bytes of all histories."""
        ...

    def num_dropped_tokens(self) -> int:
        """Output tokens that were not stored."""
        ...

    def num_recoveries(self) -> int:
        """Block markers that did not fit the open blocks."""
        ...

    def budget_stats(self) -> Sequence[BudgetStats]:
        """What the budget of each client did."""
        ...

    @property
    def policy(self) -> Policy:
        """Which draft tokens are verified."""
        ...

    def set_policy(self, policy: Policy) -> None:
        """Verify other draft tokens from the next step on; an unknown policy raises ValueError."""
        ...


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What a client of a draft server has seen of it since the client started.

    Attributes:
        is_connected: whether its stream is up.
        num_connections: streams that came up.
        num_answers: answers to the step that was the latest then.
        num_late_answers: those that a newer step had overtaken; dropped.
        round_trip_s: from handing a step over to its answer, summed over `num_answers`.
        num_resyncs: requests that the server asked to open again.
    """

    is_connected: bool
    num_connections: int
    num_answers: int
    num_late_answers: int
    round_trip_s: float
    num_resyncs: int


_LINK_COUNTERS: Mapping[str, tuple[Callable[[LinkFigures], float], str]] = {
    "agentspec_sidecar_connections": (lambda seen: seen.num_connections, "Streams to the draft server that came up."),
    "agentspec_sidecar_answers": (lambda seen: seen.num_answers, "Answers of the draft server to the latest step."),
    "agentspec_sidecar_late_answers": (lambda seen: seen.num_late_answers, "Answers that came too late; dropped."),
    "agentspec_sidecar_round_trip_seconds": (lambda seen: seen.round_trip_s, "Time until these answers, summed."),
    "agentspec_sidecar_resyncs": (lambda seen: seen.num_resyncs, "Requests that the draft server asked for again."),
}


@dataclass(frozen=True, slots=True)
class MetricsExport:
    """Metrics on their way out of this process; its owner calls `shutdown`.

    Attributes:
        port: where Prometheus finds them; 0: nowhere.
        provider: collects them.
        server: serves them on the port.
        thread: of the server.
    """

    port: int
    provider: MeterProvider
    server: WSGIServer | None = None
    thread: threading.Thread | None = None

    def shutdown(self) -> None:
        """Send what is left, wait for a dead collector no longer than two seconds, close the port."""
        if self.server is not None and self.thread is not None:
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()
        self.provider.shutdown(timeout_millis=SHUTDOWN_MS)


def export_metrics(
    engine: MeasuredEngine, fallbacks: Callable[[], Mapping[str, int]], port: int, otlp_endpoint: str | None = None
) -> MetricsExport:
    """Serve the metrics of an engine to Prometheus, send them to an OpenTelemetry collector, or both.

    The port also answers `/policy`, see `with_policy_switch`.

    Args:
        engine: asked at each scrape and before each message, on a thread of its own.
        fallbacks: counts by reason why a step got no drafts.
        port: 1 to 65535; 0: Prometheus finds nothing. One that cannot be had is warned of and passed over: drafting
            goes on without metrics.
        otlp_endpoint: URL of the collector's gRPC port. Every `OTEL_EXPORTER_OTLP_*` variable counts, and
            `OTEL_METRIC_EXPORT_INTERVAL` (milliseconds, default 60,000).
    """
    with_switch = partial(with_policy_switch, engine=engine)
    return _export(lambda meter: _register(meter, engine, fallbacks), port, otlp_endpoint, with_switch)


def export_link_metrics(
    figures: Callable[[], LinkFigures],
    fallbacks: Callable[[], Mapping[str, int]],
    port: int,
    otlp_endpoint: str | None = None,
) -> MetricsExport:
    """Export what a client sees of its draft server, which exports the figures of the engine itself.

    Args:
        figures: asked at each scrape and before each message, on a thread of its own.
        fallbacks: see `export_metrics`, as all that follows.
        port: 1 to 65535; 0: Prometheus finds nothing.
        otlp_endpoint: URL of the collector's gRPC port.
    """

    def register(meter: Meter) -> None:
        _add_fallbacks(meter, fallbacks)
        for metric, (read, description) in _LINK_COUNTERS.items():
            meter.create_observable_counter(metric, [_observe_one(_reader(read))], description=description)
        meter.create_observable_gauge(
            "agentspec_sidecar_connected",
            [_observe_one(lambda: int(figures().is_connected))],
            description="Whether the stream to the draft server is up.",
        )

    def _reader(read: Callable[[LinkFigures], float]) -> Callable[[], float]:
        return lambda: read(figures())

    return _export(register, port, otlp_endpoint)


def _export(
    register: Callable[[Meter], None],
    port: int,
    otlp_endpoint: str | None,
    wrap: Callable[[WSGIApplication], WSGIApplication] = lambda app: app,
) -> MetricsExport:
    readers: list[MetricReader] = []
    registry: CollectorRegistry | None = None
    if port:
        registry, reader = _prometheus_reader()
        readers.append(reader)
    if otlp_endpoint:
        readers.append(_otlp_reader(otlp_endpoint))
    provider = MeterProvider(readers, resource=resource(), shutdown_on_exit=False)
    register(provider.get_meter(METER_NAME))
    if registry is None:
        return MetricsExport(0, provider)
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        logger.warning("agentspec: no metrics on port %d (%s); set the option metrics_port, 0 is off", port, error)
        return MetricsExport(0, provider)
    server.set_app(wrap(make_wsgi_app(registry)))
    return MetricsExport(port, provider, server, thread)


def _prometheus_reader() -> tuple[CollectorRegistry, MetricReader]:
    if "registry" in inspect.signature(PrometheusMetricReader).parameters:
        registry = CollectorRegistry()
        return registry, PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    # Exporters before 0.64 know only the process-wide registry, and no scope labels.
    return REGISTRY, PrometheusMetricReader(disable_target_info=True)


def _otlp_reader(endpoint: str) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415  # imports grpc, 0.2 s
        OTLPMetricExporter,
    )

    return PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint))


def resource() -> Resource:
    """Who sends: one engine process, so that the collector keeps the counts of several apart."""
    attributes = {"service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = METER_NAME
    return Resource.create(attributes)


def _register(meter: Meter, engine: MeasuredEngine, fallbacks: Callable[[], Mapping[str, int]]) -> None:
    for metric, (field, description) in BLOCK_COUNTERS.items():
        meter.create_observable_counter(metric, [_observe_blocks(engine, field)], description=description)
    _add_fallbacks(meter, fallbacks)
    meter.create_observable_counter(
        "agentspec_block_recoveries",
        [_observe_one(engine.num_recoveries)],
        description="Block markers that did not fit the open blocks.",
    )
    meter.create_observable_counter(
        "agentspec_history_dropped_tokens",
        [_observe_one(engine.num_dropped_tokens)],
        description="Output tokens that were not stored: their workflow stored too much, or there was no room.",
    )
    gauges = {
        "agentspec_history_tokens": (engine.num_history_tokens, "Output tokens that can be drafted from."),
        "agentspec_history_bytes": (engine.memory_bytes, "Memory of all histories."),
        "agentspec_open_requests": (engine.num_open_requests, "Requests that the draft engine follows."),
    }
    for metric, (read, description) in gauges.items():
        meter.create_observable_gauge(metric, [_observe_one(read)], description=description)
    register_budget(meter, engine)


def _add_fallbacks(meter: Meter, fallbacks: Callable[[], Mapping[str, int]]) -> None:
    def observe_fallbacks(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {"reason": reason}) for reason, count in fallbacks().items()]

    meter.create_observable_counter(
        "agentspec_fallbacks", [observe_fallbacks], description="Times that drafting fell back, by reason."
    )


def _observe_blocks(engine: MeasuredEngine, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for row in engine.stats():
            labels = {
                "namespace": row.namespace,
                "workflow": row.workflow_id,
                "stage": row.stage,
                "block": row.block,
            }
            yield Observation(getattr(row, field), labels)

    return observe


def _observe_one(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read())

    return observe
