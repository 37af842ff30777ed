"""The replay: lanes, verification, figures, cost curves and the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from tests.trace_lab import ids, step_of, token_call, trace_line, write_lines, write_tokenizer

from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.cost_curves import CURVES, CostCurve, CostCurveError, find_curve
from agentspec.benchmarks.experiment import equal_rejection
from agentspec.benchmarks.figures import breakdown, flatten, summarise, tokens_at_rejection
from agentspec.benchmarks.methods import METHODS
from agentspec.benchmarks.methods.interface import Drafts, Setting
from agentspec.benchmarks.replay import Piece, Queue, Replay, StepLog, cut_runs
from agentspec.sidecar.engine import StepRequest, StepTiming, TokenIds

FLAT = CostCurve("flat", ((1, 10.0),))


class Scripted:
    """Drafts what it is told: each request's own answer, changed at some positions, with a falling survival."""

    def __init__(self, length: int = 3, wrong: Sequence[int] = (), *, has_survival: bool = True) -> None:
        self.length = length
        self.wrong = wrong
        self.has_survival = has_survival
        self.known: dict[int, list[int]] = {}
        self.answers: dict[int, TokenIds] = {}
        self.requests: list[StepRequest] = []
        self.closed: list[tuple[list[int], int, int]] = []
        self.recorded: list[bool] = []

    def warm(self, call: TokenCall) -> None:
        raise AssertionError("nothing is warmed up here")

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        assert handle not in self.known
        self.known[handle] = []
        self.answers[handle] = call.output
        self.recorded.append(is_recorded)

    def step(self, request: StepRequest) -> Drafts:
        self.requests.append(request)
        drafts = []
        for row, handle in enumerate(request.handles.tolist()):
            new = request.token_ids[request.token_offsets[row] : request.token_offsets[row + 1]]
            assert len(self.known[handle]) == request.positions[row]
            self.known[handle] += new.tolist()
            begin = len(self.known[handle])
            guess = self.answers[handle][begin : begin + self.length].copy()
            guess[[place - begin for place in self.wrong if begin <= place < begin + len(guess)]] += 1000
            drafts.append(guess)
        survival = [np.float32(0.75) ** np.arange(1, len(guess) + 1, dtype=np.float32) for guess in drafts]
        return Drafts(
            np.array([len(guess) for guess in drafts], np.int32),
            np.concatenate(drafts).astype(np.int32),
            np.concatenate(survival).astype(np.float32) if self.has_survival else None,
        )

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.known[handle] += tail.tolist()
        self.closed.append((self.known[handle], num_draft_tokens, num_accepted_tokens))


def play(
    method: Scripted, pieces: Sequence[Piece], batch_size: int = 1, max_tokens: int | None = None, **options: Any
) -> StepLog:
    return Replay(method, Queue(pieces, 0), batch_size, **options).run(max_tokens)


def pieces_of(*outputs: Sequence[int], workload: str = "qa") -> list[Piece]:
    return [
        Piece(workload, (token_call(output, run_id=f"r{index}", workload=workload),))
        for index, output in enumerate(outputs)
    ]


def flat(arrays: Sequence[Any]) -> list[int]:
    return np.concatenate(arrays).tolist() if arrays else []


# --- verification ---


def test_accepted_prefix_and_one_bonus_token_are_gained() -> None:
    log = play(Scripted(length=3, wrong=[5]), pieces_of(range(10)))

    assert [0, 4, 6] == flat(log.positions)
    assert [4, 2, 4] == flat(log.num_new_tokens)
    assert [3, 3, 3] == flat(log.num_draft_tokens)
    assert [3, 1, 3] == flat(log.num_accepted_tokens)


def test_answer_that_ends_inside_a_draft_gets_no_bonus_token() -> None:
    log = play(Scripted(length=3), pieces_of([1, 2, 3]))

    assert ([3], [3]) == (flat(log.num_new_tokens), flat(log.num_accepted_tokens))


def test_method_is_told_every_token_and_every_verdict_once() -> None:
    method = Scripted(length=2, wrong=[3])
    play(method, pieces_of([7, 8, 9, 10, 11, 12, 13]))

    verdicts = [(*flat([r.num_draft_tokens]), *flat([r.num_accepted_tokens])) for r in method.requests]
    assert [(0, 0), (2, 2), (2, 0)] == verdicts
    assert [([7, 8, 9, 10, 11, 12, 13], 2, 2)] == method.closed


def test_calls_of_a_run_follow_each_other() -> None:
    calls = (token_call([1, 2], run_id="a"), token_call([3, 4], run_id="a"))
    method = Scripted(length=0)
    play(method, [Piece("qa", calls)])

    assert [[1, 2], [3, 4]] == [text for text, _, _ in method.closed]


def test_draft_is_cut_where_survival_falls_below_the_threshold() -> None:
    log = play(Scripted(length=5), pieces_of(range(6)), threshold=0.5)

    assert [2, 2] == flat(log.num_draft_tokens)  # 0.75 and 0.5625 stay, 0.42 goes
    assert [2, 2] == [len(survival) for survival in log.survival]


def test_method_without_survival_is_not_cut() -> None:
    log = play(Scripted(length=5, has_survival=False), pieces_of(range(6)), threshold=0.99)

    assert ([5], []) == (flat(log.num_draft_tokens), log.survival)


def test_method_is_told_how_long_each_step_took_by_the_curve() -> None:
    method = Scripted(length=2)
    play(method, pieces_of(range(9), range(9)), 2, curve=CURVES["cpu-steep"])
    first, second = method.requests[:2]

    assert first.timing is None
    assert second.timing == StepTiming(113.0, num_decode_rows=2, num_draft_tokens=4, num_draft_rows=2)


def test_method_is_told_no_times_without_a_curve() -> None:
    method = Scripted(length=0)
    play(method, pieces_of(range(5)))

    assert {None} == {request.timing for request in method.requests}


def test_worst_window_is_that_of_the_25_steps_that_brought_least() -> None:
    log = play(Scripted(length=3, wrong=range(100, 130)), pieces_of(range(130)))
    figures = summarise(log, flatten(log, {}), CURVES["cpu-steep"], 0.0)

    assert figures["worst_window_speedup"] == pytest.approx(1.0)
    assert figures["modelled_speedup"] == pytest.approx(130 / 55)


# --- lanes ---


def test_batch_is_full_in_every_step() -> None:
    log = play(Scripted(length=0), pieces_of(*[range(n + 1) for n in range(9)]), 4)

    assert {4} == set(log.row_counts)


def test_replay_stops_at_the_asked_number_of_tokens() -> None:
    log = play(Scripted(length=0), pieces_of(*[range(100)] * 4), 2, max_tokens=31)

    assert 32 == sum(flat(log.num_new_tokens))


def test_fewer_pieces_than_lanes_are_played_together() -> None:
    log = play(Scripted(length=0), pieces_of([1, 2], [3, 4]), 8)

    assert [2, 2] == log.row_counts


def test_every_workload_gets_the_same_share_of_the_lanes() -> None:
    short, long = pieces_of(*[[1]] * 40, workload="short"), pieces_of(*[range(40)] * 4, workload="long")

    log = play(Scripted(length=0), [*short, *long], 4, max_tokens=80)

    shares = [[log.calls[call].workload for call in step.tolist()].count("long") for step in log.call_ids]
    assert {2} == set(shares)


def test_same_seed_plays_the_same_order_and_another_seed_another() -> None:
    pieces = pieces_of(*[[index] for index in range(50)])
    orders = []
    for seed in (1, 1, 2):
        queue = Queue(pieces, seed)
        orders.append([piece.calls[0].output[0] for _ in range(50) if (piece := queue.take())])

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(50))


def test_runs_are_cut_at_calls_when_there_are_too_few() -> None:
    calls = [token_call(range(10), run_id=run) for run in "ab" for _ in range(6)]

    pieces = cut_runs(calls, 4)

    assert [(2, True), (1, False), (2, False), (1, False)] == [(len(p.calls), p.is_recorded) for p in pieces[:4]]
    assert 8 == len(pieces)


def test_runs_stay_whole_when_there_are_enough() -> None:
    calls = [token_call([1], run_id=str(run)) for run in range(8) for _ in range(3)]

    assert [(3, True)] * 8 == [(len(piece.calls), piece.is_recorded) for piece in cut_runs(calls, 4)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 9))
def test_cutting_loses_no_call(lengths: list[int], batch_size: int) -> None:
    calls = [token_call(range(length)) for length in lengths]

    assert calls == [call for piece in cut_runs(calls, batch_size) for call in piece.calls]


def test_later_pieces_of_a_run_are_not_recorded() -> None:
    method = Scripted(length=0)
    play(method, cut_runs([token_call([1, 2], run_id="a"), token_call([3, 4], run_id="a")], 2), 2)

    assert [False, True] == sorted(method.recorded)


# --- figures ---


def test_figures_of_a_replay_made_by_hand() -> None:
    log = play(Scripted(length=3, wrong=[5]), pieces_of(range(10)))

    figures = summarise(log, flatten(log, {}), CURVES["h200"], 0.0)

    assert (
        figures
        | {
            "num_steps": 3,
            "num_tokens": 10,
            "num_draft_tokens": 9,
            "tokens_per_step": pytest.approx(10 / 3),
            "rejection_rate": pytest.approx(2 / 9),
            "acceptance_length": pytest.approx(1 + 7 / 3),
            "accepted_per_step": pytest.approx(7 / 3),
            "first_step_accepted": 3.0,
            "draft_tokens_per_step": 3.0,
            "budget_use": pytest.approx(3 / 205),
            "modelled_speedup": pytest.approx(10 / 3),
        }
        == figures
    )


def test_drafting_is_charged_for_every_row_of_every_step() -> None:
    log = play(Scripted(length=1), pieces_of(range(10), range(10)), 2)

    figures = summarise(log, flatten(log, {}), FLAT, 1000.0)

    assert 2 * 10 / (10 + 2 * 1) == pytest.approx(figures["modelled_speedup"])


def test_nothing_drafted_gives_no_rate() -> None:
    log = play(Scripted(length=0), pieces_of([1, 2]))

    figures = summarise(log, flatten(log, {}), CURVES["h200"], 0.0)

    assert (None, None, 1.0) == (figures["rejection_rate"], figures["acceptance_length"], figures["tokens_per_step"])


def test_calibration_compares_prediction_and_verdict_by_tenths() -> None:
    log = play(Scripted(length=2, wrong=[1, 3, 5]), pieces_of(range(6)))

    figures = summarise(log, flatten(log, {}), FLAT, 0.0)

    assert [
        {"num_tokens": 3, "predicted": pytest.approx(0.5625), "accepted": 0.0},
        {"num_tokens": 3, "predicted": pytest.approx(0.75), "accepted": 1.0},
    ] == figures["calibration"]
    assert (0.5625 + 0.25) / 2 == pytest.approx(figures["calibration_error"])
    assert figures["calibration_error_max"] is None  # no tenth has 1,000 tokens


def test_breakdown_adds_up_by_node_and_by_block() -> None:
    log = play(Scripted(length=2), pieces_of(range(9), range(5)))
    nodes: dict[str, int] = {}
    rows = flatten(log, nodes)

    found = breakdown(rows, list(nodes), ["prose"])

    assert ["thought"] == [figures["node"] for figures in found if "node" in figures]
    assert ["prose"] == [figures["block"] for figures in found if "block" in figures]
    assert {rows.figures()["num_tokens"]} == {figures["num_tokens"] for figures in found}


def test_sweep_is_interpolated_at_the_peers_rejection() -> None:
    sweep = [(0.6, 3.0), (0.2, 2.0)]

    assert [2.5, 3.0, None] == [tokens_at_rejection(sweep, rejection) for rejection in (0.4, 0.8, 0.1)]


def test_peer_stands_beside_our_sweep_of_the_same_cell() -> None:
    def cell(method: str, rejection: float | None, tokens: float, batch_size: int = 8) -> dict[str, Any]:
        return {
            "workload": "qa",
            "batch_size": batch_size,
            "method": method,
            "threshold": 0.1,
            "rejection_rate": rejection,
            "tokens_per_step": tokens,
        }

    cells = [cell("agentspec", 0.6, 3.0), cell("agentspec", 0.2, 2.0), cell("ngram", 0.4, 2.0)]
    cells += [cell("agentspec", 0.6, 9.0, 64), cell("arctic-d24", None, 1.0)]

    found = equal_rejection(cells)

    assert [("agentspec", "ngram", 2.5, 0.25)] == [
        (row["method"], row["peer"], row["tokens_per_step"], row["gain"]) for row in found
    ]


# --- cost curves ---


@pytest.mark.parametrize(
    ("name", "num_tokens", "cost"),
    [
        ("h200", 100, 1.0),
        ("h200", 206, 1.0),
        ("h200", 412, 2.0),
        ("h200-sloped", 412, 1 + 0.412 + 1),
        ("h100", 590, 2.0),
    ],
)
def test_named_curves_follow_their_formula(name: str, num_tokens: int, cost: float) -> None:
    unit = CURVES[name].points[0][1] / (1.001 if name == "h200-sloped" else 1)

    assert cost == pytest.approx(float(CURVES[name].step_ms(num_tokens)) / unit)


def test_steep_cpu_costs_3_ms_for_each_token_above_24() -> None:
    assert [113, 113, 116, 341] == CURVES["cpu-steep"].step_ms([1, 24, 25, 100]).tolist()


def test_knee_and_budget_of_a_curve() -> None:
    assert [295, 206, 153, 206, 24] == [curve.knee() for curve in CURVES.values()]
    assert [142, 0, float("inf")] == [
        CURVES["h200"].token_budget(64), CURVES["h200"].token_budget(300), FLAT.token_budget(64)
    ]  # fmt: skip


def test_curve_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text('{"points": [[1, 5], [10, 5], [20, 25]]}')

    assert [5, 15, 45] == find_curve(str(path)).step_ms([3, 15, 30]).tolist()


@pytest.mark.parametrize("text", ["[]", "{", '{"points": []}', '{"points": [[2, 1], [1, 1]]}', '{"points": [[1, 0]]}'])
def test_curve_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(text)

    with pytest.raises(CostCurveError, match=str(path)):
        find_curve(str(path))


# --- the command ---


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer, `warm` and `eval`: agents of two workloads that repeat themselves."""
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "cache"))
    write_tokenizer(tmp_path / "tokenizer.json")
    for name, runs in (("warm", range(6)), ("eval", range(4, 12))):
        (tmp_path / name).mkdir()
        for workload in ("qa", "code"):
            lines = [
                trace_line(
                    f"run {run}", step, f"Thought {step}: look up {workload}, then answer {run}.", workload=workload
                )
                for run in runs
                for step in range(3)
            ]
            write_lines(tmp_path / name / f"{workload}.jsonl.gz", lines)
    return tmp_path


def run_replay(lab: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    path = lab / "figures.json"
    arguments = ["replay", "--tokenizer", str(lab / "tokenizer.json"), "--eval", str(lab / "eval"), "--json", str(path)]
    result = CliRunner().invoke(main, [*arguments, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, json.loads(path.read_text()) if path.exists() else {}


def test_there_is_one_cell_for_each_workload_batch_method_and_threshold(lab: Path) -> None:
    options = ["--batch-size", "2", "--batch-size", "4", "--method", "agentspec", "--method", "ngram", "--mix"]
    result, found = run_replay(lab, *options, "--threshold", "0.1", "--threshold", "0.5")

    cells = [(c["workload"], c["batch_size"], c["method"], c["threshold"]) for c in found["cells"]]
    assert 0 == result.exit_code, result.output
    assert [
        (workload, batch_size, method, threshold)
        for workload in ("code", "qa", "mix")
        for batch_size in (2, 4)
        for method in ("agentspec", "ngram")
        for threshold in (0.1, 0.5)
    ] == cells


def test_history_makes_drafts_that_are_accepted(lab: Path) -> None:
    options = ["--workload", "qa", "--method", "agentspec", "--method", "ngram", "--batch-size", "2"]
    _, cold = run_replay(lab, *options)
    _, warm = run_replay(lab, *options, "--warm", str(lab / "warm"))

    assert warm["cells"][0]["tokens_per_step"] > cold["cells"][0]["tokens_per_step"] > 1.5
    assert warm["cells"][1]["tokens_per_step"] == cold["cells"][1]["tokens_per_step"]


def drafted_by(method: str, past: TokenCall | None, request: TokenCall, *, is_open: bool = False) -> list[int]:
    """What a method drafts at the start of a request, after an earlier one that has ended or goes on."""
    drafter = METHODS[method](Setting([b"%d " % token for token in range(50)], 4, None))
    if past is not None:
        drafter.open(0, past, ids(), is_recorded=True)
        drafter.step(step_of(0))
        drafter.step(step_of(0, past.output.tolist()))
        if is_open:
            drafter.step(replace(step_of(0), positions=ids(len(past.output))))
        else:
            drafter.close(0, ids(), 0, 0)
    drafter.open(1, request, request.prompt_tokens(100), is_recorded=True)
    drafted: list[int] = drafter.step(step_of(1)).token_ids.tolist()
    return drafted


@pytest.mark.parametrize(
    ("method", "ended", "running", "other_workflow"),
    [
        ("agentspec", True, True, True),
        ("untagged", True, True, True),
        ("agentspec:no-live", True, False, True),
        ("agentspec:no-wide", True, True, False),
        ("agentspec:no-shared", False, False, False),
        ("agentspec:no-block-start", False, False, False),
        ("agentspec:no-own", True, True, True),
        ("agentspec:no-calibration", True, True, True),
    ],
)
def test_part_that_is_switched_off_brings_no_draft(
    method: str, ended: bool, running: bool, other_workflow: bool
) -> None:
    past, request = token_call([1, 2, 3, 4]), token_call([1, 2, 3, 4], run_id="s")

    assert ended == (drafted_by(method, past, request)[:1] == [1])
    assert running == (drafted_by(method, past, request, is_open=True)[:1] == [1])
    assert other_workflow == (drafted_by(method, replace(past, workflow="other"), request)[:1] == [1])


@pytest.mark.parametrize(
    ("method", "is_past"), [("agentspec", True), ("agentspec", False), ("agentspec:no-live", False)]
)
def test_answer_of_the_past_is_found_by_the_end_of_its_prompt(method: str, is_past: bool) -> None:
    drafter = METHODS[method](Setting([b"%d " % token for token in range(50)], 4, None))
    answers = [([5, 6, 7], 1), ([8, 9, 10], 2)]
    for handle, (prompt, token) in enumerate(answers):
        call = token_call([token, 3, 4], prompt=prompt)
        if is_past:
            drafter.warm(call)
            continue
        drafter.open(handle, call, call.prompt_tokens(100), is_recorded=True)
        drafter.close(handle, call.output, 0, 0)

    drafted = []
    for handle, (prompt, _) in enumerate(answers, len(answers)):
        request = token_call([0], run_id="s", prompt=[11, 12, *prompt])
        drafter.open(handle, request, request.prompt_tokens(100), is_recorded=True)
        drafted.append(drafter.step(step_of(handle)).token_ids[0])

    assert [1, 2] == drafted


def test_runs_in_both_are_left_out_of_warm_and_counted(lab: Path) -> None:
    result, found = run_replay(lab, "--warm", str(lab / "warm"), "--method", "ngram")

    assert (4, 8) == (found["meta"]["num_warm_runs_left_out"], found["meta"]["num_warm_runs"])
    assert "4 runs of --warm are also in --eval" in result.output


def test_same_seed_gives_the_same_cells(lab: Path) -> None:
    methods = ["agentspec", "agentspec:strict", "untagged", "ngram", "gpu-suffix", "gpu-suffix:shadow"]
    options = [part for method in methods for part in ("--method", method)] + ["--seed", "3", "--batch-size", "3"]

    assert run_replay(lab, *options)[1]["cells"] == run_replay(lab, *options)[1]["cells"]


def test_prompts_without_outputs_are_one_line_and_no_failure(lab: Path) -> None:
    write_lines(lab / "eval" / "questions.jsonl", [{"question_id": 1, "turns": ["why?"]}])

    result, _ = run_replay(lab, "--method", "ngram")

    assert 0 == result.exit_code
    assert 1 == result.output.count("questions.jsonl: skipped, 1 prompts without outputs")


def test_prompts_alone_are_no_failure_either(lab: Path) -> None:
    write_lines(lab / "questions.jsonl", [{"question_id": 1, "turns": ["why?"]}])
    arguments = ["replay", "--tokenizer", str(lab / "tokenizer.json"), "--eval", str(lab / "questions.jsonl")]

    result = CliRunner().invoke(main, arguments)

    assert (0, 1) == (result.exit_code, len(result.output.splitlines()))


def test_broken_line_is_named_the_rest_is_played_and_the_exit_code_is_1(lab: Path) -> None:
    write_lines(lab / "eval" / "broken.jsonl", ["{", trace_line("x", 0, "fine", workload="other")])

    result, found = run_replay(lab, "--method", "ngram")

    assert 1 == result.exit_code
    assert f"{lab}/eval/broken.jsonl:1: broken line" in result.output
    assert ["code", "other", "qa"] == [cell["workload"] for cell in found["cells"]]
    assert 1 == found["meta"]["num_problems"]


def test_workload_without_calls_is_named(lab: Path) -> None:
    result, found = run_replay(lab, "--method", "ngram", "--workload", "qa", "--workload", "chess")

    assert 1 == result.exit_code
    assert "workload chess: no calls to play; there are: code, qa" in result.output
    assert ["qa"] == [cell["workload"] for cell in found["cells"]]


def test_empty_folder_is_named(lab: Path) -> None:
    (lab / "nothing").mkdir()
    result, _ = run_replay(lab, "--method", "ngram", "--warm", str(lab / "nothing"))

    assert 1 == result.exit_code
    assert f"{lab}/nothing: no *.jsonl or *.jsonl.gz in it" in result.output


def test_tokenizer_that_is_none_is_named(lab: Path) -> None:
    (lab / "tokenizer.json").write_text("{}")

    result, _ = run_replay(lab)

    assert 1 == result.exit_code
    assert f"{lab}/tokenizer.json: not a tokenizer.json" in result.output


def test_unknown_method_and_curve_are_bad_options(lab: Path) -> None:
    assert 2 == run_replay(lab, "--method", "magic")[0].exit_code
    assert "no curve of that name: h100, h200" in run_replay(lab, "--cost-curve", "b200")[0].output


def test_node_and_block_figures_are_in_the_breakdown(lab: Path) -> None:
    _, found = run_replay(lab, "--method", "agentspec", "--workload", "qa")

    assert [("node", "thought"), ("block", "prose")] == [
        (kind, row[kind]) for row in found["breakdown"] for kind in ("node", "block") if kind in row
    ]


def test_equal_rejection_is_given_for_a_sweep(lab: Path) -> None:
    options = ["--method", "agentspec", "--method", "ngram", "--workload", "qa", "--warm", str(lab / "warm")]
    _, found = run_replay(lab, *options, "--threshold", "0.1", "--threshold", "0.9")

    assert [("agentspec", "ngram")] * 2 == [(row["method"], row["peer"]) for row in found["equal_rejection"]]


def test_sample_is_played_where_nothing_is_named(lab: Path) -> None:
    arguments = ["replay", "--tokenizer", str(lab / "tokenizer.json"), "--method", "agentspec", "--max-tokens", "2000"]

    result = CliRunner().invoke(main, arguments)

    assert 0 == result.exit_code, result.output
    assert "research_agents" in result.output
