"""How much memory and whose text: quotas of namespaces, shares of workflows, caps on keys and on what is stored."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_player import NESTED, SMALL_VOCABULARY, Client, Playground, fuzzing, seeded
from tests.reference import token_ids

from agentspec.sidecar.engine import Engine, FinishReason, Sampling
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

WORDS = range(2, 1000)
NUM_WORKFLOWS = 4
ROUNDS = 6


def texts_of(seed: int, num_texts: int, num_tokens: int) -> list[list[int]]:
    random = seeded(seed)
    return [random.choices(WORDS, k=num_tokens) for _ in range(num_texts)]


def num_accepted(client: Client, text: list[int], **tags: Any) -> int:
    """Write a text as a target model would, and count what its drafts were worth."""
    client.open(-3, **tags)
    accepted, draft = 0, client.step(text[0], handle=-3)
    position = 1
    while position < len(text):
        agreed = 0
        while agreed < len(draft) and position + agreed < len(text) - 1 and draft[agreed] == text[position + agreed]:
            agreed += 1
        accepted += agreed
        draft = client.step(*text[position : position + agreed + 1], handle=-3)
        position += agreed + 1
    client.close(handle=-3)
    return accepted


def changed(text: list[int], random: Random) -> list[int]:
    """The same with one token in 20 another."""
    return [token if random.random() > 0.05 else random.choice(WORDS) for token in text]


class Agents:
    """Workflows that write variants of their texts in turn, each text once a round."""

    def __init__(self, client: Client, *, stage: str = "s", tenant: str = "n") -> None:
        self.client, self.stage, self.tenant = client, stage, tenant
        self.texts = {f"w{number}": texts_of(number, 20, 60) for number in range(NUM_WORKFLOWS)}
        self.random = seeded(99)

    def work(self, disturb: Callable[[], None] | None = None) -> int:
        """Return the accepted tokens of a round; `disturb` runs before each text."""
        accepted = 0
        for number in range(20):
            for workflow, texts in self.texts.items():
                if disturb is not None:
                    disturb()
                text = changed(texts[number], self.random)
                accepted += num_accepted(self.client, text, workflow_id=workflow, stage=self.stage, tenant=self.tenant)
        self.client.engine.check_integrity()
        return accepted


class Flood:
    """Writes twenty times as much as the agents: noise, and their own first words with other ends."""

    def __init__(self, agents: Agents, *, num_stages: int = 0, tenant: str = "n", num_requests: int = 20) -> None:
        self.agents, self.tenant, self.num_stages, self.num_requests = agents, tenant, num_stages, num_requests
        self.random = seeded(7)
        self.num_written = 0

    def __call__(self) -> None:
        for _ in range(self.num_requests):
            self.num_written += 1
            text = self.random.choices(WORDS, k=60)
            if self.num_written % 2:
                begun = self.random.choice(self.agents.texts["w0"])
                text = begun[: self.random.randrange(40)] + text[:20]
            stage = f"f{self.num_written % self.num_stages}" if self.num_stages else self.agents.stage
            self.agents.client.write(*text, workflow_id="flood", stage=stage, tenant=self.tenant)


def accepted_with_and_without(history_bytes: int, **flood: Any) -> tuple[int, int]:
    counts = []
    for is_flooded in (True, False):
        agents = Agents(Client(history_bytes=history_bytes))
        disturb = Flood(agents, **flood) if is_flooded else None
        counts.append(sum(agents.work(disturb) for _ in range(ROUNDS)))
    return counts[0], counts[1]


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param({}, id="in the same stage"),
        pytest.param({"num_stages": 1}, id="in a stage of its own"),
        pytest.param({"num_stages": 8}, id="in many stages"),
        pytest.param({"num_stages": 10_000}, id="in a stage each time"),
        pytest.param({"tenant": "m"}, id="in another namespace"),
        pytest.param({"tenant": "m", "num_stages": 50}, id="in many stages of another namespace"),
    ],
)
def test_one_flooding_workflow_costs_the_others_at_most_a_tenth_of_their_accepted_tokens(
    flood: dict[str, Any],
) -> None:
    with_flood, without = accepted_with_and_without(1 << 20, **flood)

    assert without > 10_000
    assert with_flood >= 0.9 * without


def test_a_flooding_workflow_still_drafts_from_its_latest_text() -> None:
    agents = Agents(Client(history_bytes=1 << 20))
    agents.work(Flood(agents))
    texts = texts_of(5, 20, 50)
    for text in texts:
        agents.client.write(*text, workflow_id="flood", stage="s", tenant="n")

    drafts = [agents.client.draft_after(*text[:3], workflow_id="flood", stage="s", tenant="n") for text in texts]
    assert [text[3:10] for text in texts] == [draft[:7] for draft in drafts]


def test_what_a_workflow_stores_apart_is_no_evidence_for_others() -> None:
    agents = Agents(Client(history_bytes=1 << 20))
    agents.work(Flood(agents))
    agents.client.write(*range(5, 30), workflow_id="flood", stage="s", tenant="n")

    assert [] == agents.client.draft_after(*range(5, 10), workflow_id="w0", stage="s", tenant="n")


def test_a_history_that_a_workflow_stored_apart_is_saved_loaded_and_deleted_with_its_stage() -> None:
    agents = Agents(Client(history_bytes=1 << 20))
    agents.work(Flood(agents))
    agents.client.write(*range(5, 30), workflow_id="flood", stage="s", tenant="n")
    archive = agents.client.engine.export_histories("n")
    num_tokens = agents.client.engine.num_history_tokens()
    other = Client()
    other.engine.import_histories(archive)

    assert num_tokens == other.engine.num_history_tokens()
    assert [10, 11] == other.draft_after(*range(5, 10), workflow_id="flood", stage="s", tenant="n")[:2]
    assert num_tokens == agents.client.engine.delete_namespace("n")
    assert 0 == agents.client.engine.memory_bytes()


def test_a_workflow_alone_in_its_namespace_may_fill_all_of_the_memory() -> None:
    client = Client(history_bytes=1 << 20)
    for number, text in enumerate(texts_of(1, 2000, 60)):
        client.write(*text, workflow_id="w", stage=f"{number % 9}")

    assert client.engine.memory_bytes() > 0.8 * (1 << 20)


def test_a_namespace_never_exceeds_its_quota_and_takes_nothing_from_others() -> None:
    client = Client(history_bytes=1 << 20, namespace_bytes=1 << 17)
    client.write(*range(5, 30), tenant="small")
    alone = client.engine.memory_bytes()
    for number, text in enumerate(texts_of(1, 3000, 60)):
        client.write(*text, tenant="large", stage=f"{number % 7}")
        assert client.engine.memory_bytes() <= alone + (1 << 17)

    client.engine.check_integrity()
    assert list(range(7, 20)) == client.draft_after(5, 6, tenant="small")[:13]


def test_a_flood_of_keys_takes_those_of_its_own_namespace_and_workflow() -> None:
    client = Client(max_histories=50)
    for name in ("a", "b"):
        client.write(5, 6, tenant=name, workflow_id="w", stage="s")
    for number in range(500):
        client.write(5, 7, tenant="a", workflow_id="flood", stage=f"{number}")

    client.engine.check_integrity()
    drafts = [client.draft_after(5, tenant=name, workflow_id="w", stage="s") for name in ("a", "b")]
    assert [[6], [6]] == drafts


def test_a_workflow_stores_no_more_per_second_than_it_may() -> None:
    client = Client(stored_tokens_per_s=1000.0)
    start = time.perf_counter()
    for text in texts_of(1, 100, 100):
        client.write(*text, workflow_id="fast")
    num_stored, num_dropped = client.engine.num_history_tokens(), client.engine.num_dropped_tokens()
    elapsed = time.perf_counter() - start
    client.write(5, 6, workflow_id="slow")

    assert 1000 <= num_stored <= 1200 + 1000 * elapsed
    assert 10_000 <= num_stored + num_dropped <= 10_300
    assert [6] == client.draft_after(5, workflow_id="slow")


def test_a_workflow_that_stored_too_much_may_store_again_after_a_while() -> None:
    client = Client(stored_tokens_per_s=100.0)
    for text in texts_of(1, 10, 100):
        client.write(*text)
    time.sleep(1.2)
    client.write(5, 6)

    client.engine.check_integrity()
    assert [6] == client.draft_after(5)


@fuzzing
@given(st.randoms(use_true_random=False), st.integers(10, 60), st.sampled_from([400, 6_000, 25_000, 100_000]))
def test_any_sequence_of_calls_keeps_accounts_and_quotas(random: Random, num_calls: int, history_bytes: int) -> None:
    engine = Engine(
        SMALL_VOCABULARY,
        NESTED,
        history_bytes=history_bytes,
        namespace_bytes=history_bytes // 2,
        max_histories=5,
        stored_tokens_per_s=random.choice([100.0, 1e9]),
    )

    def check() -> None:
        engine.check_integrity()
        assert engine.memory_bytes() <= history_bytes // 2

    Playground(random, [engine]).play(num_calls, check)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def churn(engine: Engine, num_tokens: int, history_bytes: int) -> list[int]:
    """Write random texts in many keys; return the resident bytes at each tenth of the way."""
    generator, resident = np.random.default_rng(0), []
    for tenth in range(10):
        for number in range(num_tokens // 10 // 2000):
            text = generator.integers(2, 1000, 2000, dtype=np.int32)
            tags = Tags(workflow_id=f"w{number % 13}", stage=f"{number % 31}")
            engine.open(0, token_ids(5, 6), tags, Sampling(), namespace=f"n{number % 5}")
            engine.close(0, FinishReason.STOP, 2000, text)
            assert engine.memory_bytes() <= history_bytes, f"tenth {tenth}"
        resident.append(resident_bytes())
    return resident


@pytest.mark.slow
def test_memory_stays_within_the_quota_while_a_hundred_times_as_much_is_written() -> None:
    history_bytes = 1 << 23
    engine = Engine([b"%d " % token for token in range(1000)], CHAT, history_bytes=history_bytes)
    resident = churn(engine, 40_000_000, history_bytes)

    engine.check_integrity()
    assert max(resident[1:]) - resident[1] < history_bytes // 2
