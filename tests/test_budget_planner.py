"""The planner inside the engine: what it learns of step times, and when it stops drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.reference import Row, step_request, token_ids

from agentspec.sidecar.budget import POLICIES, BudgetOptions, Policy
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepTiming
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import UNTAGGED

VOCABULARY = [bytes([97 + i % 26]) for i in range(200)]
TEXT = list(range(10, 190))


def steep(num_tokens: float) -> float:
    return 100 + 3 * max(0.0, num_tokens - 24)


def new_engine(policy: Policy = "goodput", **options: Any) -> Engine:
    options = {"arithmetic_intensity": 24.0, "draft_us": 0.0} | options
    return Engine(VOCABULARY, CHAT, budget=BudgetOptions(policy, **options))


def feed(engine: Engine, timing: StepTiming) -> None:
    """A step of no rows that only brings a measured time."""

    engine.step(replace(step_request([]), timing=timing))


def measured(rows: int, drafts: int = 0, ms: float | None = None) -> StepTiming:
    duration = steep(rows + drafts) if ms is None else ms
    return StepTiming(duration, rows, drafts, min(rows, drafts))


def predict(engine: Engine, rows: int, drafts: int = 0) -> float:
    predicted = engine.predict_step_ms(measured(rows, drafts))
    assert predicted is not None
    return predicted


class Players:
    """Requests that all write the same text, driven as a server would, on a machine whose step takes `step_ms`."""

    def __init__(self, engine: Engine, num_rows: int, step_ms: Callable[[int], float]) -> None:
        self.engine = engine
        self.step_ms = step_ms
        self.positions = [0] * num_rows
        self.new: list[list[int]] = [[] for _ in range(num_rows)]
        self.verdicts = [(0, 0)] * num_rows
        self.timing: StepTiming | None = None
        self.skips: list[int] = []
        for handle in range(num_rows):
            engine.open(handle, token_ids(), UNTAGGED, Sampling())

    def play(self, num_steps: int, texts: Sequence[Sequence[int]]) -> list[int]:
        """Returns the draft tokens of each step."""
        drafted = []
        for _ in range(num_steps):
            drafts = self.step()
            begin = 0
            for row, length in enumerate(drafts.draft_lengths.tolist()):
                draft = drafts.draft_token_ids[begin : begin + length].tolist()
                begin += length
                text, position = texts[row], self.positions[row]
                agreed = 0
                while agreed < length and draft[agreed] == text[(position + agreed) % len(text)]:
                    agreed += 1
                self.new[row] = [text[(position + i) % len(text)] for i in range(agreed + 1)]
                self.verdicts[row] = (length, agreed)
            rows = len(texts)
            self.timing = StepTiming(
                self.step_ms(rows + begin), rows, begin, int(np.count_nonzero(drafts.draft_lengths))
            )
            drafted.append(begin)
        return drafted

    def step(self) -> Any:

        rows = [
            Row(handle, self.positions[handle], self.new[handle], 16, *self.verdicts[handle])
            for handle in range(len(self.positions))
        ]
        drafts = self.engine.step(replace(step_request(rows), timing=self.timing))
        self.positions = [at + len(new) for at, new in zip(self.positions, self.new, strict=True)]
        self.skips.append(drafts.skip_steps)
        return drafts


def warm(engine: Engine) -> None:
    for handle in range(1000, 1010):
        engine.open(handle, token_ids(), UNTAGGED, Sampling())
        engine.close(handle, FinishReason.STOP, len(TEXT), token_ids(*TEXT))


# --- cost model ---


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    assert new_engine().predict_step_ms(measured(8)) is None


def test_steps_of_many_kinds_are_predicted_after_300_of_them() -> None:
    engine = new_engine(arithmetic_intensity=206.0)
    random = np.random.default_rng(0)
    kinds = [(rows, drafts) for rows in (1, 8, 32, 64) for drafts in (0, 4, 16, 40)]
    for _ in range(300):
        rows, drafts = kinds[random.integers(len(kinds))]
        feed(engine, measured(rows, drafts, steep(rows + drafts) * random.lognormal(0, 0.06)))
    errors = [abs(predict(engine, *kind) / steep(sum(kind)) - 1) for kind in kinds]

    assert sum(error < 0.1 for error in errors) >= 0.9 * len(errors)


def test_change_of_load_is_followed_within_50_steps() -> None:
    engine = new_engine()
    random = np.random.default_rng(1)
    for factor, num_steps in ((1.0, 300), (1.5, 50)):
        for _ in range(num_steps):
            rows, drafts = random.choice([8, 32]), random.choice([0, 8])
            ms = factor * steep(rows + drafts) * random.lognormal(0, 0.05)
            feed(engine, measured(int(rows), int(drafts), ms))

    assert predict(engine, 32, 8) == pytest.approx(1.5 * steep(40), rel=0.1)


def test_one_stalled_step_changes_little() -> None:
    engine = new_engine()
    for _ in range(50):
        feed(engine, measured(8))
    feed(engine, measured(8, ms=30_000.0))

    assert predict(engine, 8) == pytest.approx(steep(8), rel=0.1)


@pytest.mark.parametrize("duration_ms", [0.0, -5.0, float("inf"), 1e9])
def test_time_that_cannot_be_is_refused_and_counted(duration_ms: float) -> None:
    engine = new_engine()
    feed(engine, measured(8))
    before = predict(engine, 8)
    feed(engine, measured(8, ms=duration_ms))
    feed(engine, StepTiming(100.0, 0))
    (stats,) = engine.budget_stats()

    assert (predict(engine, 8), stats.num_timings, stats.num_bad_timings) == (before, 1, 2)


def test_clients_have_cost_models_of_their_own() -> None:

    engine = new_engine()
    for client_id, ms in ((0, 100.0), (7, 300.0)):
        engine.step(replace(step_request([]), timing=measured(8, ms=ms), client_id=client_id))

    predicted = [engine.predict_step_ms(measured(8), client_id) for client_id in (0, 7)]

    assert predicted == [pytest.approx(100, rel=0.01), pytest.approx(300, rel=0.01)]


def test_saved_cost_model_keeps_the_shape_and_takes_the_new_level() -> None:
    engine, other = new_engine(), new_engine()
    for rows in (1, 8, 24, 32, 64, 96) * 20:
        feed(engine, measured(rows))

    assert other.import_cost_model(engine.export_cost_model())
    feed(other, measured(8, ms=2 * steep(8)))
    assert predict(other, 64) == pytest.approx(2 * steep(64), rel=0.05)


def test_saved_cost_model_that_is_cut_changed_or_foreign_is_refused() -> None:
    engine = new_engine()
    feed(engine, measured(8))
    saved = engine.export_cost_model()
    changed = saved[:100] + bytes([saved[100] ^ 1]) + saved[101:]
    foreign = new_engine(arithmetic_intensity=206.0)
    feed(foreign, measured(8))

    taken = [engine.import_cost_model(it) for it in (b"", saved[:-1], changed, foreign.export_cost_model(), saved)]

    assert [False, False, False, False, True] == taken


# --- policies ---


def test_goodput_drafts_where_steps_are_flat_and_not_where_every_token_costs() -> None:
    drafted = []
    for step_ms in (lambda _n: 10.0, lambda n: 10.0 * n + 30.0 * (n > 4)):
        engine = new_engine()
        warm(engine)
        drafted.append(sum(Players(engine, 4, step_ms).play(260, [TEXT] * 4)[-60:]))

    assert drafted[0] > 100  # of 60 steps
    assert drafted[1] < 60  # probes


def test_shadow_verifies_nothing_and_counts_what_it_would_have() -> None:
    engine = new_engine("shadow")
    warm(engine)
    drafted = Players(engine, 4, lambda _n: 10.0).play(30, [TEXT] * 4)
    (stats,) = engine.budget_stats()

    assert sum(drafted) == 0
    assert sum(bucket.num_draft_tokens for bucket in stats.buckets) > 0


@pytest.mark.parametrize(("policy", "expected"), [("uniform", 8), ("redundancy", 8), ("fixed", 64), ("off", 0)])
def test_policy_spends_its_budget(policy: Policy, expected: int) -> None:
    engine = new_engine(policy, arithmetic_intensity=12.0)
    warm(engine)

    assert expected == Players(engine, 4, lambda _n: 10.0).play(40, [TEXT[3:]] * 4)[3]


def test_policy_is_switched_while_requests_run() -> None:
    engine = new_engine("off")
    warm(engine)
    players = Players(engine, 4, lambda _n: 10.0)
    sums = []
    for policy in ("off", "fixed", "off"):
        engine.set_policy(policy)
        sums.append(sum(players.play(6, [TEXT] * 4)) > 0)

    assert [False, True, False] == sums
    assert engine.policy == "off"


def test_drafting_that_never_pays_backs_off_and_returns_when_it_does() -> None:
    engine = new_engine(draft_us=1000.0)
    warm(engine)
    random = np.random.default_rng(2)
    noise = [random.integers(10, 190, 1000).tolist() for _ in range(4)]
    players = Players(engine, 4, lambda _n: 10.0)
    players.play(150, noise)
    num_skipped = sum(skip > 0 for skip in players.skips[-100:])
    drafted = players.play(200, [noise[0][:40]] * 4)

    assert num_skipped > 80
    assert sum(drafted[100:]) > 0


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"policy: expected one of goodput, .* got 'fast'"):
        new_engine().set_policy("fast")  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fast"),
        ("arithmetic_intensity", 0.0),
        ("arithmetic_intensity", float("nan")),
        ("slope", -0.1),
        ("slope", float("nan")),
        ("min_gain", -1.0),
        ("min_gain", float("nan")),
        ("draft_us", -1.0),
        ("draft_us", float("inf")),
        ("capture_sizes", (4, 2)),
        ("capture_sizes", (0,)),
    ],
)
def test_absurd_budget_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        BudgetOptions(**{field: value})


def test_every_policy_has_a_number_in_the_core() -> None:
    engine = new_engine()
    seen = []
    for policy in POLICIES:
        engine.set_policy(policy)
        seen.append(engine.policy)

    assert list(POLICIES) == seen
