"""One LLM call: its tags and headers on the way out, its figures on the way back; the same for every client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from agentspec.middleware.caller import current_caller
from agentspec.middleware.destinations import may_be_tagged
from agentspec.middleware.fail_open import fail_open
from agentspec.middleware.feedback import CallOutcome, read_outcome
from agentspec.middleware.settings import Settings
from agentspec.middleware.tags import MergedTags, PayloadTags, merge_xargs, payload_tags
from agentspec.middleware.telemetry import active_span, record_call, trace_headers

XARGS_KEY = "vllm_xargs"
GROUP_HEADER = "x-agentspec-group"
_LLM_PATHS = ("/chat/completions", "/completions", "/responses")


def is_llm_request(path: str) -> bool:
    """Whether a POST to this path asks for generated text."""
    return path.endswith(_LLM_PATHS)


@dataclass(slots=True, eq=False)
class TaggedCall:
    """A call on its way.

    Attributes:
        xargs: `vllm_xargs` to send.
        headers: to send besides the user's own, which win.
        answer: what holds the figures, once there is something.
    """

    xargs: dict[str, Any]
    headers: dict[str, str]
    _settings: Settings
    _tags: dict[str, Any]
    _model: str | None
    _span: Any
    _started_s: float
    answer: object = None
    _is_failed: bool = False
    _is_finished: bool = False

    def finish(self) -> None:
        """Count the call with the figures of its `answer`, once."""
        if self._is_finished:
            return
        self._is_finished = True
        with fail_open:
            duration_s = time.perf_counter() - self._started_s
            outcome = CallOutcome(duration_s) if self.answer is None else read_outcome(self.answer, duration_s)
            if self._is_failed:
                outcome = replace(outcome, is_failed=True)
            names = str(self._tags.get("workflow_id", "")), str(self._tags.get("stage", ""))
            self._settings.feedback.add_call(*names, outcome)
            record_call(self._span, self._tags, self._model, outcome)

    def fail(self) -> None:
        """Note that the client raised."""
        self._is_failed = True

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Count the call as failed if the block raises."""
        try:
            yield
        except BaseException:
            self.fail()
            self.finish()
            raise


def tag_call(url: str, body: Mapping[str, Any]) -> TaggedCall | None:
    """Tag the LLM call that the current caller is about to make; None if this call gets no tags.

    Args:
        url: absolute URL of the server.
        body: the request's JSON body; not changed.
    """
    caller = current_caller()
    if caller is None or not may_be_tagged(url, caller.settings.endpoints):
        return None
    xargs = body.get(XARGS_KEY)
    if xargs is not None and not isinstance(xargs, Mapping):
        return None
    settings, tags = caller.settings, caller.tags()
    merged = merge_xargs(xargs or {}, tags, _within_bounds(settings, tags.stage, payload_tags(body)))
    model = body.get("model")
    return TaggedCall(
        merged.xargs,
        _headers(settings, merged),
        settings,
        merged.values,
        model if isinstance(model, str) else None,
        active_span(merged.values),
        time.perf_counter(),
    )


def _within_bounds(settings: Settings, stage: str | None, payload: PayloadTags) -> PayloadTags:
    version = payload.prompt_version
    if version is None:
        return payload
    shown = settings.shown_prompts.bound(stage or "", version)
    return payload if shown == version else replace(payload, prompt_version=shown)


def _headers(settings: Settings, merged: MergedTags) -> dict[str, str]:
    headers = trace_headers() if settings.propagates_trace else {}
    if settings.sends_group:
        headers[GROUP_HEADER] = merged.group()
    return headers
