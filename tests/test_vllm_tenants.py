"""Tenants on a real vLLM engine: what one wrote is never drafted for another."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.vllm_lab import Lab, SpyClient, greedy, prompts

from agentspec.serving_patch.client import DraftClient, EmbeddedClient
from agentspec.sidecar.engine import StepDrafts

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SECRET = {40_011, 40_012}  # token ids that no other output holds


class DraftSpy(SpyClient):
    """Keeps every token that was drafted, by handle."""

    def __init__(self, target: DraftClient) -> None:
        super().__init__(target)
        self.drafts: dict[int, set[int]] = {}

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        drafts = super().collect(deadline_ms=deadline_ms)
        if drafts is not None:
            parts = np.split(drafts.draft_token_ids, np.cumsum(drafts.draft_lengths)[:-1])
            for handle, part in zip(self.steps[-1].handles.tolist(), parts, strict=True):
                self.drafts.setdefault(handle, set()).update(part.tolist())
        return drafts


@pytest.fixture
def spy(lab: Lab) -> DraftSpy:
    spy = DraftSpy(lab.new_client())
    lab.use(spy)
    return spy


def run_as(lab: Lab, spy: DraftSpy, salt: str, namespace: str, **kwargs: Any) -> set[int]:
    """Serve one request of a tenant; returns the tokens that were drafted for it."""
    tags = {"workflow_id": "w", "stage": "s", "namespace": namespace}
    params = greedy(24, extra_args={"agentspec": json.dumps(tags)}, **kwargs)
    prompt: Any = {"prompt": prompts(1)[0]}
    if salt:
        prompt["cache_salt"] = salt
    lab.llm.generate(prompt, params, use_tqdm=False)
    lab.settle()
    return spy.drafts.get(max(spy.prompts), set())


def test_secret_of_one_tenant_is_drafted_for_no_other(lab: Lab, spy: DraftSpy) -> None:
    for _ in range(3):
        run_as(lab, spy, "red", "team", allowed_token_ids=sorted(SECRET))
    others = [("blue", "team"), ("", "team"), ("red", ""), ("red", "other"), ("", "")]
    drafted = [run_as(lab, spy, *tenant) for tenant in others]

    assert [tokens & SECRET for tokens in drafted] == [set()] * len(others)
    assert run_as(lab, spy, "red", "team") & SECRET  # else the test sees nothing


def test_tenants_with_different_salts_share_nothing(lab: Lab) -> None:
    engine = lab.new_engine()
    spy = SpyClient(EmbeddedClient(engine))
    lab.use(spy)
    llm = lab.llm
    text = [int(token) for token in np.random.default_rng(1).integers(20, 49000, 40)]
    for salt in ("red", "blue", "red"):
        llm.generate({"prompt_token_ids": text, "cache_salt": salt}, greedy(12), use_tqdm=False)
    llm.generate({"prompt_token_ids": text}, greedy(12), use_tqdm=False)
    lab.settle()
    first, other, again, unsalted = spy.namespaces.values()

    assert first == again
    assert len({first, other, unsalted}) == 3
    assert unsalted == "default"
    assert first.startswith("default/salt-")
    assert "red" not in first
    assert {row.namespace for row in engine.stats()} == {first, other, unsalted}
