"""vLLM's schedulers beside the V2 hook: they tell the worker what it can't know, and count what was really verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from agentspec.sidecar.engine import FinishReason

from .compat_v2 import probe_v2
from .mailbox import Fallbacks
from .request import finish_reason, traceparent_of

_Base: Any = object  # of the mixin, whose attributes are those of what it is mixed over


@contextmanager
def fail_open(fallbacks: Fallbacks) -> Iterator[None]:
    """The boundary: whatever fails inside is counted, and vLLM goes on without drafts."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # see above
        fallbacks.note("hook_error", repr(error))


@dataclass(slots=True)
class WorkerNews:
    """What the worker can't know and the scheduler tells it with a step.

    Attributes:
        ended: requests that ended: how, and how many output tokens their clients got.
        salts: `cache_salt` of requests that start.
        traceparents: trace context of those that are traced.
        sessions: requests that start and whose output becomes prompt: they are not followed.
    """

    ended: dict[str, tuple[FinishReason, int]] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)
    traceparents: dict[str, str] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)


class _NewsMixin(_Base):
    """A scheduler of vLLM that tells the worker what it knows, and counts only what was really verified."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        probe_v2(self.vllm_config)
        self._news = WorkerNews()
        self._news_fallbacks = Fallbacks()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Send the news along."""
        output = super().schedule(*args, **kwargs)
        with fail_open(self._news_fallbacks):
            for new in output.scheduled_new_reqs:
                request = self.requests[new.req_id]
                if request.cache_salt:
                    self._news.salts[new.req_id] = request.cache_salt
                if traceparent := traceparent_of(request):
                    self._news.traceparents[new.req_id] = traceparent
                if request.resumable:
                    self._news.sessions.add(new.req_id)
        output.agentspec_news, self._news = self._news, WorkerNews()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take placeholders that the worker cut for invalid ones, so that vLLM's own counters stay exact."""
        with fail_open(self._news_fallbacks):
            verified = getattr(model_runner_output, "agentspec_num_verified", None) or {}
            invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
            for request_id, num_verified in verified.items():
                cut = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())) - num_verified
                if cut > 0:
                    invalid[request_id] = max(invalid.get(request_id, 0), cut)
            if invalid:
                scheduler_output.num_invalid_spec_tokens = invalid
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        with fail_open(self._news_fallbacks):
            self._news.ended[request.request_id] = finish_reason(request), request.num_output_tokens
        return super()._free_request(request, *args, **kwargs)


class AgentSpecAsyncScheduler(_NewsMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with news for the worker."""


class AgentSpecSyncScheduler(_NewsMixin, Scheduler):
    """vLLM's synchronous scheduler with news for the worker."""
