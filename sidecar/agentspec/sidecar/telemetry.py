"""Prometheus metrics of one draft engine, fed from its own counts when somebody asks: the hot path never sees them."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from agentspec.sidecar.engine import BlockStats

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

METER_NAME = "agentspec"

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

    def num_recoveries(self) -> int:
        """Block markers that did not fit the open blocks."""
        ...


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running HTTP endpoint; its owner calls `shutdown`.

    Attributes:
        port: where it listens.
    """

    port: int
    provider: MeterProvider
    server: WSGIServer
    thread: threading.Thread

    def shutdown(self) -> None:
        """Close the port and join the thread."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.provider.shutdown()


def make_registry(
    engine: MeasuredEngine, fallbacks: Callable[[], Mapping[str, int]]
) -> tuple[CollectorRegistry, MeterProvider]:
    """Tie an engine's counts to a Prometheus registry.

    Args:
        engine: asked at each scrape.
        fallbacks: counts by reason why a step got no drafts.

    Returns:
        The registry to serve, and the meter provider to shut down with it.
    """
    if "registry" in inspect.signature(PrometheusMetricReader).parameters:
        registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    else:  # exporters before 0.64 know only the process-wide registry, and no scope labels
        registry = REGISTRY
        reader = PrometheusMetricReader(disable_target_info=True)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    meter = provider.get_meter(METER_NAME)
    for metric, (field, description) in BLOCK_COUNTERS.items():
        meter.create_observable_counter(metric, [_observe_blocks(engine, field)], description=description)

    def observe_fallbacks(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {"reason": reason}) for reason, count in fallbacks().items()]

    meter.create_observable_counter(
        "agentspec_fallbacks", [observe_fallbacks], description="Times that drafting fell back, by reason."
    )
    meter.create_observable_counter(
        "agentspec_block_recoveries",
        [_observe_one(engine.num_recoveries)],
        description="Block markers that did not fit the open blocks.",
    )
    gauges = {
        "agentspec_history_tokens": (engine.num_history_tokens, "Output tokens that can be drafted from."),
        "agentspec_history_bytes": (engine.memory_bytes, "Memory of all histories."),
        "agentspec_open_requests": (engine.num_open_requests, "Requests that the draft engine follows."),
    }
    for metric, (read, description) in gauges.items():
        meter.create_observable_gauge(metric, [_observe_one(read)], description=description)
    return registry, provider


def serve_metrics(
    engine: MeasuredEngine, fallbacks: Callable[[], Mapping[str, int]], port: int
) -> MetricsServer | None:
    """Serve the metrics over HTTP on a thread of this process.

    Args:
        engine: see `make_registry`.
        fallbacks: see `make_registry`.
        port: 1 to 65535.

    Returns:
        The running server; None, after one warning, when the port cannot be had: drafting goes on without metrics.
    """
    registry, provider = make_registry(engine, fallbacks)
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        logger.warning("agentspec: no metrics on port %d (%s); set the option metrics_port, 0 is off", port, error)
        provider.shutdown()
        return None
    return MetricsServer(port, provider, server, thread)


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


def _observe_one(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read())

    return observe
