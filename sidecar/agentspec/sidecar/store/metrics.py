"""Metrics of shared histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from agentspec.sidecar.store.figures import StoreFigures

_GAUGES: Mapping[str, tuple[Callable[[StoreFigures], float], str]] = {
    "agentspec_redis_connected": (lambda seen: seen.is_connected, "Whether Redis answers."),
    "agentspec_redis_complete": (lambda seen: seen.is_complete, "Whether all that was shared before is here."),
    "agentspec_redis_namespaces": (lambda seen: seen.num_namespaces, "Namespaces that are followed."),
    "agentspec_redis_delay_seconds": (
        lambda seen: seen.delay_s,
        "Age of the last entry when it came, by both machines' clocks.",
    ),
}
_BY_LABEL: Mapping[str, tuple[Callable[[StoreFigures], Mapping[Any, int]], str, str]] = {
    "agentspec_redis_entries": (lambda seen: seen.num_entries, "direction", "Entries, published, received and loaded."),
    "agentspec_redis_tokens": (lambda seen: seen.num_tokens, "direction", "Output tokens in them."),
    "agentspec_redis_bytes": (lambda seen: seen.num_bytes, "direction", "Their size in Redis."),
    "agentspec_redis_skipped": (
        lambda seen: seen.num_skipped,
        "reason",
        "Entries that were of no use here, by reason.",
    ),
    "agentspec_redis_failures": (lambda seen: seen.num_failures, "kind", "Calls to Redis that failed, by kind."),
}
_COUNTERS: Mapping[str, tuple[Callable[[StoreFigures], float], str]] = {
    "agentspec_redis_dropped_tokens": (
        lambda seen: seen.num_dropped_tokens,
        "Output tokens that could not be published: too many waited, or Redis was full.",
    ),
    "agentspec_redis_snapshots": (lambda seen: seen.num_snapshots, "Snapshots that this process wrote."),
}


def register_store(meter: Meter, figures: Callable[[], StoreFigures | None]) -> None:
    """Add the instruments of shared histories.

    Args:
        meter: of the provider that exports the engine's figures.
        figures: asked on a thread of the exporter; None: nothing is shared now.
    """

    def observe(
        read: Callable[[StoreFigures], Iterable[Observation]],
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def callback(_: CallbackOptions) -> Iterable[Observation]:
            seen = figures()
            return [] if seen is None else read(seen)

        return callback

    for metric, (value, description) in _GAUGES.items():
        meter.create_observable_gauge(metric, [observe(_one(value))], description=description)
    for metric, (value, description) in _COUNTERS.items():
        meter.create_observable_counter(metric, [observe(_one(value))], description=description)
    for metric, (values, label, description) in _BY_LABEL.items():
        meter.create_observable_counter(metric, [observe(_labelled(values, label))], description=description)


def _one(value: Callable[[StoreFigures], float]) -> Callable[[StoreFigures], Iterable[Observation]]:
    return lambda seen: [Observation(float(value(seen)))]


def _labelled(
    values: Callable[[StoreFigures], Mapping[Any, int]], label: str
) -> Callable[[StoreFigures], Iterable[Observation]]:
    return lambda seen: [Observation(count, {label: name}) for name, count in values(seen).items()]
