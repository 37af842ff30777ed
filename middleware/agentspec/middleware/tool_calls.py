"""`AgentSpecToolMiddleware`: the middleware form for LLM calls that an agent's tools make."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.types import Command

from agentspec.middleware.fail_open import fail_open
from agentspec.middleware.langgraph import AgentSpecMiddleware
from agentspec.middleware.scope import UNNAMED_WORKFLOW, ToolCall, add_tool_call, in_tool_call, scope_of


class AgentSpecToolMiddleware(AgentMiddleware):
    """Tag the LLM calls that an agent's tools make, and measure the tools, where the graph is not wrapped.

    It is apart from `AgentSpecMiddleware` because an agent with a middleware around its tools no longer refuses calls
    of unknown tools when it is built. A wrapped graph needs neither.

    !!! example

        ```python
        spec = AgentSpecMiddleware(workflow_id="triage")
        agent = create_agent(model, tools, middleware=[spec, AgentSpecToolMiddleware(spec)])
        ```

    Args:
        spec: whose settings count, and whose `stats()` shows the tools.

    Raises:
        TypeError: `spec` is no `AgentSpecMiddleware`.
    """

    def __init__(self, spec: AgentSpecMiddleware) -> None:
        super().__init__()
        if not isinstance(spec, AgentSpecMiddleware):
            raise TypeError(f"spec: expected an AgentSpecMiddleware, got {type(spec).__name__}: {spec!r}")
        self._settings = spec.settings

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Say which tool runs; the request itself is not touched."""
        with self._in_tool_call(request):
            return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Say which tool runs; the request itself is not touched."""
        with self._in_tool_call(request):
            return await handler(request)

    @contextmanager
    def _in_tool_call(self, request: ToolCallRequest) -> Iterator[None]:
        call = None
        with fail_open:
            if scope_of(var_child_runnable_config.get()) is None:  # else the run's own scope sees the tool
                call = ToolCall(self._settings, str(request.tool_call["name"]))
        started_s = time.perf_counter()
        try:
            with in_tool_call(call):
                yield
        finally:
            if call is not None:
                workflow_id = self._settings.workflow_id or UNNAMED_WORKFLOW
                add_tool_call(self._settings, workflow_id, f"tools/tool:{call.name}", time.perf_counter() - started_s)
