"""What an engine has seen of sharing its histories through a draft server, and the metrics of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Meter, Observation


@dataclass(slots=True)
class HistoryFigures:
    """Counts since the engine started; each is written by one thread.

    Attributes:
        is_sending: whether the server takes blocks.
        is_receiving: whether the server sends them.
        num_namespaces: that are followed.
        num_sent_tokens: output tokens that the server took.
        num_received_tokens: output tokens of other engines, those of the histories at first use included.
        num_dropped_tokens: that were written and not sent: too many waited, or the server refused them.
        num_missed_tokens: that the server could not keep for this engine.
        num_skipped_blocks: that had come before, were deleted, or could not be read.
        num_send_failures: calls that failed.
        num_receive_failures: calls that failed, and histories that could not be read.
    """

    is_sending: bool = False
    is_receiving: bool = False
    num_namespaces: int = 0
    num_sent_tokens: int = 0
    num_received_tokens: int = 0
    num_dropped_tokens: int = 0
    num_missed_tokens: int = 0
    num_skipped_blocks: int = 0
    num_send_failures: int = 0
    num_receive_failures: int = 0


_Labels = dict[str, str]
_Read = Callable[[HistoryFigures], Iterable[tuple[float, _Labels]]]

_GAUGES: dict[str, tuple[_Read, str]] = {
    "agentspec_hybrid_connected": (
        lambda seen: [
            (int(seen.is_sending), {"direction": "sent"}),
            (int(seen.is_receiving), {"direction": "received"}),
        ],
        "Whether the draft server takes and sends histories.",
    ),
    "agentspec_hybrid_namespaces": (lambda seen: [(seen.num_namespaces, {})], "Namespaces that are followed."),
}
_COUNTERS: dict[str, tuple[_Read, str]] = {
    "agentspec_hybrid_tokens": (
        lambda seen: [
            (seen.num_sent_tokens, {"direction": "sent"}),
            (seen.num_received_tokens, {"direction": "received"}),
        ],
        "Output tokens that went to the draft server and came from it.",
    ),
    "agentspec_hybrid_lost_tokens": (
        lambda seen: [
            (seen.num_dropped_tokens, {"direction": "sent"}),
            (seen.num_missed_tokens, {"direction": "received"}),
        ],
        "Output tokens that were not shared: too many waited, or they were refused.",
    ),
    "agentspec_hybrid_skipped": (
        lambda seen: [(seen.num_skipped_blocks, {})],
        "Blocks of no use here: they had come before, or were deleted.",
    ),
    "agentspec_hybrid_failures": (
        lambda seen: [
            (seen.num_send_failures, {"direction": "sent"}),
            (seen.num_receive_failures, {"direction": "received"}),
        ],
        "Calls to the draft server that failed.",
    ),
}


def register_histories(meter: Meter, figures: Callable[[], HistoryFigures]) -> None:
    """Add the instruments.

    Args:
        meter: of the provider that exports the engine's figures.
        figures: asked on a thread of the exporter.
    """

    def observe(read: _Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(value, labels) for value, labels in read(figures())]

    for metric, (read, description) in _GAUGES.items():
        meter.create_observable_gauge(metric, [observe(read)], description=description)
    for metric, (read, description) in _COUNTERS.items():
        meter.create_observable_counter(metric, [observe(read)], description=description)
