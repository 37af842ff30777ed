"""vLLM in this process as each method runs it, and the histories that a method starts a cell with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from agentspec.benchmarks.serving.protocol import EngineSettings, ServedCall
from agentspec.sidecar.budget import POLICIES, Policy
from agentspec.sidecar.engine import FinishReason, Sampling
from agentspec.sidecar.tags import TAGS_KEY, Tags

NUM_SPECULATIVE_TOKENS = 16
DEADLINE_MS = 200.0  # of a step's drafts: a neighbour on the same core must not pass for a slow drafter
_PROMPT_END_TOKENS = 32  # of a past prompt; a history keeps the last 15
_NAMESPACE = "default"

_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
# First and last number of requests, and the draft tokens of each.
_SD_SCHEDULE = [[1, 8, 4], [9, 32, 2], [33, 1024, 0]]

ENGINE_KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain-default": {},
        "plain": {},
        "ngram": {"speculative_config": _NGRAM},
        "suffix": {"speculative_config": {"method": "suffix"}},
        "dynamic-sd": {"speculative_config": {**_NGRAM, "num_speculative_tokens_per_batch_size": _SD_SCHEDULE}},
        "agentspec": {
            "scheduler_cls": "agentspec.serving_patch.hook_v1.AgentSpecScheduler",
            "speculative_config": {
                "method": "custom_class",
                "model": "agentspec.serving_patch.hook_v1.NullProposer",
                "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            },
            "additional_config": {
                "agentspec": {"metrics_port": 0, "deadline_ms": DEADLINE_MS, "namespace": _NAMESPACE},
            },
        },
    }
)
"""Arguments of vLLM's `LLM` by the kind of engine, beside those that all share."""

METHODS = (*ENGINE_KINDS, *(f"agentspec:{policy}" for policy in POLICIES))
"""What may be measured: a kind of engine, or AgentSpec's with another policy."""


def llm_arguments(settings: EngineSettings) -> dict[str, Any]:
    """All arguments of vLLM's `LLM`; `plain-default` leaves scheduling and compilation to vLLM."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "load_format": settings.load_format,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_batch_size,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "disable_log_stats": True,
        **ENGINE_KINDS[settings.kind],
    }
    if settings.kind != "plain-default":
        arguments |= {"enforce_eager": True, "enable_prefix_caching": not settings.is_forced}
    if settings.kind != "plain-default" or settings.is_forced:
        arguments["async_scheduling"] = False
    if settings.is_decode_only:
        arguments["kv_transfer_config"] = {
            "kv_connector": "SkipPrefill",
            "kv_role": "kv_both",
            "kv_connector_module_path": "agentspec.benchmarks.serving.skip_prefill",
        }
    return arguments


def call_tags(call: ServedCall, *, is_recorded: bool) -> dict[str, str]:
    """Entries of `SamplingParams.extra_args` as a tagged agent sends them."""
    tags = {
        "v": 1,
        "workflow_id": call.workflow,
        "stage": call.node,
        "agent_id": call.agent_id,
        "query_id": call.run_id,
        "history": "rw" if is_recorded else "read",
    }
    return {TAGS_KEY: json.dumps(tags)}


class Drafter:
    """What drafts in an engine, as far as a cell resets it: plain decoding and `ngram` keep nothing."""

    def start_cell(self, past: Sequence[ServedCall], policy: str | None) -> str | None:
        """Forget the last cell and take in the past; returns the `cache_salt` that the cell's requests carry."""
        del past, policy
        return None

    def facts(self) -> dict[str, Any]:
        """Counts of the cell that the engine's outputs do not tell."""
        return {}


class AgentSpecDrafter(Drafter):
    """The hook's own engine; each cell has a namespace, and with it histories and calibration, of its own.

    What the engine learned of the step times stays, as it does in a server.

    Args:
        scheduler: of the hook.
    """

    def __init__(self, scheduler: Any) -> None:
        # The hook keeps its engine to itself: nothing but this benchmark writes histories past it.
        self._fallbacks = scheduler._fallbacks
        self._engine = scheduler._drafting._engine
        self._default_policy: Policy = self._engine.policy
        self._num_cells = 0
        self._num_past = 0
        self._namespace = ""
        self._fallbacks_before: dict[str, int] = {}

    def start_cell(self, past: Sequence[ServedCall], policy: str | None) -> str | None:
        """Warm a new namespace."""
        from agentspec.serving_patch.request import namespace_of  # noqa: PLC0415  # reads a salt as the hook does

        if self._namespace:
            self._engine.delete_namespace(self._namespace)
        self._engine.set_policy(policy or self._default_policy)
        salt = f"cell-{self._num_cells}"
        self._num_cells += 1
        self._namespace = namespace_of(_NAMESPACE, _SaltedRequest(salt))
        for call in past:
            self._num_past += 1
            handle = -self._num_past
            tags = Tags(workflow_id=call.workflow, stage=call.node, agent_id=call.agent_id)
            prompt_end = np.ascontiguousarray(call.prompt[-_PROMPT_END_TOKENS:])
            self._engine.open(handle, prompt_end, tags, Sampling(), namespace=self._namespace)
            self._engine.close(handle, FinishReason.STOP, len(call.output), call.output)
        self._fallbacks_before = self._fallbacks.counts()
        return salt

    def facts(self) -> dict[str, Any]:
        """Steps and requests that got no draft although they should have, by reason."""
        counts = self._fallbacks.counts()
        before = self._fallbacks_before
        return {"fallbacks": {name: n - before.get(name, 0) for name, n in counts.items() if n > before.get(name, 0)}}


class SuffixDrafter(Drafter):
    """vLLM's `suffix`: Arctic's cache, a new one for each cell.

    Args:
        proposer: of the model runner.
    """

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer

    def start_cell(self, past: Sequence[ServedCall], policy: str | None) -> str | None:
        """Answers of the past become cached requests."""
        del policy
        stock = self._proposer.suffix_cache
        cache = type(stock)(max_tree_depth=stock.max_tree_depth, max_cached_requests=stock.max_cached_requests)
        for index, call in enumerate(past):
            name = f"past-{index}"
            cache.start_request(name, call.output[:0])
            cache.add_active_response(name, call.output)
            cache.stop_request(name)
        self._proposer.suffix_cache = cache
        return None


class _SaltedRequest:
    """What `namespace_of` reads of a request of vLLM."""

    lora_request = None

    def __init__(self, cache_salt: str) -> None:
        self.cache_salt = cache_salt


def make_drafter(kind: str, scheduler: Any, runner: Any) -> Drafter:
    """What drafts in an engine, from vLLM's scheduler and model runner."""
    if kind == "agentspec":
        return AgentSpecDrafter(scheduler)
    return SuffixDrafter(runner.drafter) if kind == "suffix" else Drafter()
