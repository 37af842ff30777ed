"""What the demo keeps of every LLM call: who made it, and the exact token ids of prompt and output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from langgraph.config import get_config

TOKEN_IDS_REQUEST = {"return_token_ids": True}
"""Field of vLLM's chat completions that asks for token ids; goes into the client's `extra_body`."""


class RecordingError(RuntimeError):
    """An answer lacks what the demo compares."""


@dataclass(frozen=True, slots=True)
class Call:
    """One finished LLM call.

    Attributes:
        agent: thread id of the LangGraph run.
        stage: node of the graph.
        iteration: how often this agent called from this stage before.
        prompt_token_ids: as the server's chat template made them.
        output_token_ids: every sampled token that counts, the end-of-sequence token included.
        num_verified_drafts: request-steps that verified a draft; 0 under plain decoding.
        num_draft_tokens: draft tokens that they verified.
        num_accepted_tokens: how many of them the target model accepted.
    """

    agent: str
    stage: str
    iteration: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    num_verified_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class CallRecorder:
    """Keeps the calls of one batch of agents; `client` is what the chat model sends them with.

    Attributes:
        on_call: called after each call that was kept.
        calls: in the order in which they ended, which is each agent's own order.
    """

    on_call: Callable[[], None] = lambda: None
    calls: list[Call] = field(default_factory=list)
    _num_calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def client(self, *, timeout_s: float) -> httpx.AsyncClient:
        """A client whose every answer is kept; its owner closes it."""
        return httpx.AsyncClient(timeout=timeout_s, event_hooks={"response": [self._keep]})

    async def _keep(self, response: httpx.Response) -> None:
        await response.aread()
        if response.status_code == httpx.codes.OK:
            config = get_config()  # the hook runs inside the node that made the call
            agent, stage = str(config["configurable"]["thread_id"]), str(config["metadata"]["langgraph_node"])
            self.calls.append(read_call(json.loads(response.content), agent, stage, self._num_calls[agent, stage]))
            self._num_calls[agent, stage] += 1
            self.on_call()


def read_call(body: dict[str, Any], agent: str, stage: str, iteration: int) -> Call:
    """Read one chat completion of vLLM.

    Raises:
        RecordingError: the server did not send token ids.
    """
    prompt, output = body.get("prompt_token_ids"), body["choices"][0].get("token_ids")
    if prompt is None or output is None:
        raise RecordingError(
            f"{agent}, {stage}: expected token ids in the answer; the server must be vLLM 0.32 or newer"
        )
    speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return Call(
        agent=agent,
        stage=stage,
        iteration=iteration,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        num_verified_drafts=speculation.get("num_spec_steps", 0),
        num_draft_tokens=speculation.get("num_draft_tokens", 0),
        num_accepted_tokens=speculation.get("num_accepted_draft_tokens", 0),
    )
