"""The same figures as OpenTelemetry metrics and span attributes, where the OpenTelemetry API is installed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from agentspec.middleware.feedback import CallOutcome

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    HAS_OPENTELEMETRY = False
else:
    HAS_OPENTELEMETRY = True

SCOPE = "agentspec.middleware"
# Tags that the GenAI conventions have a name for; the others are `agentspec.<field>`.
_CONVENTIONAL = {
    "workflow_id": "gen_ai.workflow.name",
    "agent_id": "gen_ai.agent.name",
    "thread_id": "gen_ai.conversation.id",
}
_OUTCOME_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "draft_tokens": "agentspec.draft_tokens",
    "accepted_tokens": "agentspec.accepted_tokens",
    "num_draft_steps": "agentspec.draft_steps",
}


def span_attributes(tags: Mapping[str, Any]) -> dict[str, str | int | bool | list[str]]:
    """Tags as attributes of a span; a grammar, which is no name, is left out."""
    return {
        _CONVENTIONAL.get(name, f"agentspec.{name}"): value
        for name, value in tags.items()
        if isinstance(value, str | int) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    }


def active_span(tags: Mapping[str, Any]) -> Any:
    """The current span, with the tags as its attributes; `None` if nobody records one."""
    if not HAS_OPENTELEMETRY:
        return None
    span = trace.get_current_span()
    if not span.is_recording():
        return None
    span.set_attributes(span_attributes(tags))
    return span


def trace_headers() -> dict[str, str]:
    """`traceparent` and `tracestate` of the current span; empty if there is none. Baggage stays here."""
    headers: dict[str, str] = {}
    if HAS_OPENTELEMETRY and trace.get_current_span().get_span_context().is_valid:
        _propagator().inject(headers)
    return headers


def record_call(span: Any, tags: Mapping[str, Any], model: str | None, outcome: CallOutcome) -> None:
    """Add one LLM call to the metrics and, while it lasts, to its span.

    Args:
        span: from `active_span`.
        tags: of the call.
        model: name that the request gave.
        outcome: what the call brought.
    """
    if not HAS_OPENTELEMETRY:
        return
    known = {name: value for name in _OUTCOME_ATTRIBUTES if (value := getattr(outcome, name)) is not None}
    if span is not None and span.is_recording():
        span.set_attributes({_OUTCOME_ATTRIBUTES[name]: value for name, value in known.items()})
    _instruments().record_call(_labels(tags, model), outcome)


def record_tool_call(tags: Mapping[str, Any], duration_s: float) -> None:
    """Add one tool call to the metrics."""
    if HAS_OPENTELEMETRY:
        _instruments().tool_duration.record(duration_s, _labels(tags, None))


def _labels(tags: Mapping[str, Any], model: str | None) -> dict[str, str]:
    labels = {"gen_ai.workflow.name": str(tags.get("workflow_id", "")), "agentspec.stage": str(tags.get("stage", ""))}
    if model:
        labels |= {"gen_ai.operation.name": "chat", "gen_ai.request.model": model}
    return labels


class _Instruments:
    """The metrics of the process; the API's own proxies make them work whenever a provider is set."""

    def __init__(self) -> None:
        meter = metrics.get_meter(SCOPE)
        self.duration = meter.create_histogram(
            "gen_ai.client.operation.duration", unit="s", description="From request to end of answer"
        )
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage", unit="{token}", description="Tokens of a call"
        )
        self.drafted = meter.create_counter(
            "agentspec.client.draft_tokens", unit="{token}", description="Draft tokens that were verified"
        )
        self.accepted = meter.create_counter(
            "agentspec.client.accepted_tokens", unit="{token}", description="Draft tokens that were accepted"
        )
        self.tool_duration = meter.create_histogram(
            "agentspec.client.tool.duration", unit="s", description="Time of a tool call"
        )

    def record_call(self, labels: dict[str, str], outcome: CallOutcome) -> None:
        self.duration.record(outcome.duration_s, {**labels, "error.type": "_OTHER"} if outcome.is_failed else labels)
        for kind, number in (("input", outcome.prompt_tokens), ("output", outcome.output_tokens)):
            if number is not None:
                self.tokens.record(number, {**labels, "gen_ai.token.type": kind})
        if outcome.draft_tokens is not None:
            self.drafted.add(outcome.draft_tokens, labels)
            self.accepted.add(outcome.accepted_tokens or 0, labels)


@functools.cache
def _instruments() -> _Instruments:
    return _Instruments()


@functools.cache
def _propagator() -> TraceContextTextMapPropagator:
    return TraceContextTextMapPropagator()
