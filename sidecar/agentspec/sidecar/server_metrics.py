"""Metrics of the draft server beside those of its engines: who is connected, and what was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation


def register_server(meter: Meter, num_streams: Callable[[], int], refusals: Callable[[], Mapping[str, int]]) -> None:
    """Add the server's own instruments.

    Args:
        meter: of the provider that exports the engines' figures.
        num_streams: engines that are connected now; asked on a thread of the exporter, as the next.
        refusals: counts by name of the gRPC code since the server started.
    """

    def observe_streams(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(num_streams())]

    def observe_refusals(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {"code": code}) for code, count in refusals().items()]

    meter.create_observable_gauge("agentspec_streams", [observe_streams], description="Engines that are connected.")
    meter.create_observable_counter(
        "agentspec_refusals", [observe_refusals], description="Calls, opens, closes and steps that were refused."
    )
