"""The parts of `agentspec-bench serve` that need no engine: player, figures, tool times, results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.trace_lab import ids, token_call

from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.serving.figures import cell_figures, latency_figures
from agentspec.benchmarks.serving.player import CallTimes, CellPlayer, MismatchError, Step
from agentspec.benchmarks.serving.protocol import CellDone, CellJob, ServedCall, ServedRun
from agentspec.benchmarks.serving.quality import compare_outputs, read_tool_calls
from agentspec.benchmarks.serving.random_model import QWEN_05B, kv_bytes_per_token
from agentspec.benchmarks.serving.results import Cell, CellKey, Results, ResultsError
from agentspec.benchmarks.serving.tool_time import ToolTime, parse_tool_time
from agentspec.benchmarks.serving.workloads import Cut, make_workload, split_by_run
from agentspec.sidecar.engine import TokenIds

STEP_S = 0.5


class ScriptedEngine:
    """Writes `pace` tokens of each forced output a step; each step takes half a second.

    Args:
        wrong: output position at which another token comes out.
    """

    def __init__(self, pace: int = 1, wrong: int | None = None) -> None:
        self.pace = pace
        self.wrong = wrong
        self.left: dict[str, list[int]] = {}
        self.submitted: list[tuple[int, list[int], list[int]]] = []
        self.num_running: list[int] = []

    def submit(
        self, request_id: str, call: ServedCall, prompt: TokenIds, output: TokenIds, *, is_recorded: bool
    ) -> None:
        assert request_id not in self.left
        tokens = output.tolist()
        self.submitted.append((call.call_id, prompt.tolist(), tokens))
        if self.wrong is not None:
            tokens[self.wrong] += 1
        self.left[request_id] = tokens

    def step(self) -> Step:
        self.num_running.append(len(self.left))
        names = tuple(self.left)
        new = {name: self.left[name][: self.pace] for name in names}
        for name in names:
            self.left[name] = self.left[name][self.pace :]
        finished = frozenset(name for name in names if not self.left[name])
        for name in finished:
            del self.left[name]
        num_draft = self.pace - 1
        drafts = dict.fromkeys(names, num_draft) if num_draft else {}
        accepted = {name: len(tokens) - 1 for name, tokens in new.items()} if num_draft else {}
        return Step(names, drafts, accepted, 0, new, finished, STEP_S, 2 * STEP_S)

    def abort(self, request_ids: list[str]) -> None:
        for name in request_ids:
            del self.left[name]


def served(call_id: int, length: int = 4, run_id: str = "r") -> ServedCall:
    output = np.arange(length, dtype=np.int32) + 10 * call_id
    return ServedCall(call_id, "w", "node", "agent", run_id, ids(1, 2), output, np.zeros(length, np.uint16))


def job(
    runs: Sequence[Sequence[ServedCall]], batch_size: int = 1, *, tool_time: ToolTime | None = None, warm_up: int = 0
) -> CellJob:
    played = tuple(ServedRun(tuple(calls), is_recorded=True) for calls in runs)
    return CellJob("plain", None, batch_size, played, (), tool_time or ToolTime(), warm_up, seed=0)


def player(engine: ScriptedEngine, cell: CellJob, *, is_forced: bool = False) -> CellPlayer:
    return CellPlayer(engine, cell, is_forced=is_forced, step_s=lambda step: step.cpu_s)


def play(engine: ScriptedEngine, cell: CellJob, num_steps: int, *, is_forced: bool = False) -> CellPlayer:
    playing = player(engine, cell, is_forced=is_forced)
    for _ in range(num_steps):
        playing.step()
    return playing


def test_calls_of_a_run_come_one_after_the_other() -> None:
    engine = ScriptedEngine()
    play(engine, job([[served(0, 2), served(1, 2)], [served(2, 2)]]), 6)

    assert [0, 1, 2] == [call_id for call_id, _, _ in engine.submitted]
    assert [1] * 6 == engine.num_running


def test_as_many_agents_run_as_the_batch_has_places() -> None:
    engine = ScriptedEngine()
    play(engine, job([[served(i, 3)] for i in range(9)], batch_size=3), 6)

    assert [3] * 6 == engine.num_running


def test_cell_is_dry_when_an_agent_finds_no_run() -> None:
    playing = player(ScriptedEngine(), job([[served(0, 2)]]))
    playing.step()
    before = playing.is_dry
    playing.step()

    assert [False, True] == [before, playing.is_dry]


def test_agent_waits_for_its_tool_while_others_go_on() -> None:
    engine = ScriptedEngine()
    cell = job([[served(0, 1), served(1, 1)], [served(2, 9)]], batch_size=2, tool_time=ToolTime("constant", 1.0))
    play(engine, cell, 4)

    assert [2, 1, 1, 2] == engine.num_running


def test_clock_jumps_when_all_agents_wait() -> None:
    engine = ScriptedEngine()
    cell = job([[served(0, 2), served(1, 2)], [served(2, 2)]], tool_time=ToolTime("constant", 60.0))
    log = play(engine, cell, 6).finish()

    assert [0.0, 61.0, 62.0] == [call.submitted_at for call in log.calls]


def test_forced_output_that_differs_is_refused_with_its_place() -> None:
    playing = play(ScriptedEngine(wrong=0), job([[served(7, 1)], [served(8, 2)]]), 0, is_forced=True)

    with pytest.raises(MismatchError, match=r"call 7 \(run r\) differs from its trace at token 0"):
        playing.step()


def test_forced_output_that_is_cut_off_is_compared_too() -> None:
    playing = play(ScriptedEngine(wrong=0), job([[served(7, 50)]]), 2, is_forced=True)

    with pytest.raises(MismatchError):
        playing.finish()


def test_first_forced_outputs_begin_in_their_middle() -> None:
    engine = ScriptedEngine()
    cell = job([[served(i, 40)] for i in range(16)], batch_size=8)
    player(engine, cell, is_forced=True)
    lengths = [len(output) for _, _, output in engine.submitted]

    assert len(set(lengths)) > 4
    for call_id, prompt, output in engine.submitted:
        assert prompt + output == [1, 2, *served(call_id, 40).output.tolist()]


def test_warm_up_steps_and_the_calls_that_began_in_them_are_left_out() -> None:
    engine = ScriptedEngine()
    log = play(engine, job([[served(i, 2)] for i in range(9)], warm_up=3), 8).finish()

    assert len(log.steps) == 5
    assert [2.0, 3.0] == [call.submitted_at for call in log.calls]


def test_drafts_count_for_the_block_in_which_the_step_began() -> None:
    call = served(0, 8)
    call.blocks[4:] = 1
    log = play(ScriptedEngine(pace=4), job([[call], [served(1)]]), 2).finish()

    assert {0: [1, 3, 3], 1: [1, 3, 3]} == log.blocks


def test_goodput_is_tokens_per_time_of_the_steps_without_prefill() -> None:
    log = play(ScriptedEngine(pace=2), job([[served(i, 4)] for i in range(9)], batch_size=2), 6).finish()
    with_prefill = Step(("x",), {}, {}, 5, {"x": [1]}, frozenset(), 10.0, 10.0)
    log.steps.append(with_prefill)
    figures = cell_figures(log, step_s=lambda step: step.cpu_s, is_decode_only=False)

    assert figures["num_decode_steps"] == 6
    assert figures["decode_goodput"] == 6 * 2 * 2 / (6 * STEP_S)
    assert figures["goodput"] == (24 + 1) / (6 * STEP_S + 10.0)
    assert [figures["acceptance_rate"], figures["acceptance_length"], figures["tokens_per_step"]] == [1.0, 2.0, 2.0]
    assert [("2-8", 6, 2.0)] == [
        (row["rows"], row["num_steps"], row["draft_tokens_per_step"]) for row in figures["buckets"]
    ]
    assert [{"num_rows": 2, "num_draft_tokens": 2, "num_steps": 6, "median_ms": 500.0}] == figures["step_times"]


def test_latencies_are_those_of_whole_requests() -> None:
    whole = CallTimes(1.0, is_whole=True, is_warm_up=False, token_at=[1.5, 2.0, 4.0], num_tokens=6)
    begun_before = CallTimes(0.0, is_whole=False, is_warm_up=False, token_at=[9.0], num_tokens=1)
    figures = latency_figures([whole, begun_before])

    assert figures["num_requests"] == 1
    assert figures["ttft_ms"]["p50"] == 500
    assert figures["tpot_ms"]["p50"] == 500
    assert figures["itl_ms"]["p50"] == 1250
    assert figures["e2el_ms"]["p90"] == 3000
    assert figures["e2el_ms"]["p99"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.5", ToolTime("constant", 2.5)),
        ("exp:3", ToolTime("exponential", 3.0)),
        ("lognormal:2:0.5", ToolTime("lognormal", 2.0, 0.5)),
    ],
)
def test_tool_times_are_read(text: str, expected: ToolTime) -> None:
    assert expected == parse_tool_time(text)
    assert expected == parse_tool_time(str(expected))


@pytest.mark.parametrize("text", ["", "-1", "exp", "exp:x", "exp:1:2", "lognormal:1", "gauss:1", "inf", "nan"])
def test_other_tool_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected SECONDS"):
        parse_tool_time(text)


def test_tool_times_have_the_mean_or_median_that_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    exponential = [ToolTime("exponential", 3.0).draw(rng) for _ in range(4000)]
    lognormal = [ToolTime("lognormal", 2.0, 1.0).draw(rng) for _ in range(4000)]

    assert np.mean(exponential) == pytest.approx(3.0, rel=0.1)
    assert np.median(lognormal) == pytest.approx(2.0, rel=0.1)


def test_past_and_present_share_no_run() -> None:
    calls = [token_call([1, 2], run_id=f"run-{index // 2}") for index in range(200)]
    past, present = split_by_run(calls, 0.5)

    assert {call.run_id for call in past}.isdisjoint({call.run_id for call in present})
    assert len(past) + len(present) == 200
    assert 60 <= len(past) <= 140
    assert ([], calls) == split_by_run(calls, 0.0)


def test_workload_cuts_prompts_at_their_front_and_outputs_at_their_end() -> None:
    call = token_call([5, 6, 7, 8], prompt=[1, 2, 3])
    workload = make_workload([call], [call], [1], Cut(2, 3), seed=0)
    (played,) = workload.runs[1][0].calls

    assert [2, 3] == played.prompt.tolist()
    assert [5, 6, 7] == played.output.tolist()
    assert len(played.blocks) == 3
    assert [5, 6, 7, 8] == workload.past[0].output.tolist()


def test_keys_and_values_of_qwen_take_12_kib_a_token() -> None:
    assert kv_bytes_per_token(QWEN_05B, 2) == 12288


def run_of(*calls: ServedCall) -> ServedRun:
    return ServedRun(calls, is_recorded=True)


def text(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode()


def answer(written: str) -> tuple[int, ...]:
    return tuple(written.encode())


def test_answers_are_compared_call_by_call() -> None:
    runs = [run_of(served(0), served(1)), run_of(served(2, run_id="q"))]
    plain = {0: answer("abc"), 1: answer("final"), 2: answer("other"), 3: answer("only plain")}
    other = {0: answer("abX"), 1: answer("final "), 2: answer("other")}
    figures = compare_outputs(plain, other, runs, text)

    assert (3, 1) == (figures["num_calls"], figures["num_identical_calls"])
    assert (2, 2) == (figures["num_final_answers"], figures["num_equal_final_answers"])
    assert [(0, 2), (1, 5)] == [(change["call"], change["token"]) for change in figures["changes"]]


def test_tool_calls_are_compared_by_name_argument_names_and_arguments() -> None:
    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    plain = call("a", x=1) + call("b", x=1) + call("c", x=1) + call("d", x=1)
    other = call("a", x=1) + call("b", x=2) + call("c", y=1) + call("e", x=1)
    figures = compare_outputs({0: answer(plain)}, {0: answer(other)}, [run_of(served(0))], text)

    assert figures["num_tool_calls"] == 4
    assert figures["num_equal_tool_names"] == 3
    assert figures["num_equal_argument_names"] == 2
    assert figures["num_equal_arguments"] == 1


def test_broken_tool_call_has_no_name() -> None:
    calls = read_tool_calls(
        '<tool_call>{"name": </tool_call><tool_call>[1]</tool_call><tool_call>{"name": "a"}</tool_call>'
    )

    assert [None, None, "a"] == [call.name for call in calls]


KEY = CellKey("w", 8, "agentspec", 0)
DONE = CellDone(
    {"decode_goodput": 30.0, "decode_goodput_wall": 10.0, "goodput": 5.0, "block_counts": {1: [2, 4, 1]}}, {}
)
PLAIN = CellDone({"decode_goodput": 20.0, "decode_goodput_wall": 10.0, "goodput": 5.0, "block_counts": {}}, {})


def test_results_go_on_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    results = Results(path, {"seed": 0})
    results.add(Cell.of(KEY, DONE, PLAIN, ["text", "code"]))
    results.save()
    again = Results(path, {"seed": 0})

    assert again.has(KEY)
    assert json.loads(path.read_text())["cells"] == [cell.record() for cell in again.cells()]
    assert again.cells()[0].figures["speedup_vs_plain"] == 1.5
    assert again.cells()[0].figures["blocks"][0]["rejection_rate"] == 0.75


def test_failure_never_replaces_figures_and_figures_replace_a_failure() -> None:
    results = Results(None, {})
    failed = Cell.failed(KEY, "died", "tail")
    results.add(failed)
    assert not results.has(KEY)
    results.add(Cell.of(KEY, DONE, None, ["text", "code"]))
    results.add(failed)

    assert results.has(KEY)
    assert results.cells()[0].figures["speedup_vs_plain"] is None


@pytest.mark.parametrize("text", ["{", "[]", '{"meta": {}, "cells": []}'])
def test_file_that_is_no_result_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(ResultsError, match="no result of `serve`"):
        Results(path, {})
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "model", "--decode-only"), "--decode-only needs --target forced"),
        (("--tool-time", "often"), "expected SECONDS, exp:MEAN or lognormal:MEDIAN:SIGMA"),
        (("--method", "magic"), "'magic' is not one of"),
        (("--max-engines", "1"), "1 is not in the range"),
    ],
)
def test_bad_option_ends_with_code_2(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, ["serve", *options])

    assert done.exit_code == 2
    assert message in done.output
