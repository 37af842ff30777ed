"""`agentspec-bench serve`: vLLM against every method, on recorded agent runs."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

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
from agentspec.benchmarks.models import ModelError, cache_folder, resolve_model
from agentspec.benchmarks.report import SERVE_COLUMNS, output_console, print_table
from agentspec.benchmarks.serving.engine_process import find_allocator
from agentspec.benchmarks.serving.engines import METHODS
from agentspec.benchmarks.serving.matrix import BASELINE, Matrix, MatrixPlan, Workload
from agentspec.benchmarks.serving.protocol import EngineSettings
from agentspec.benchmarks.serving.random_model import has_weights, kv_bytes_per_token, write_random_model
from agentspec.benchmarks.serving.results import Results, ResultsError
from agentspec.benchmarks.serving.tool_time import ToolTime, parse_tool_time
from agentspec.benchmarks.serving.workloads import Cut, make_workload, split_by_run
from agentspec.benchmarks.tokenizer import QWEN3, TokenizerError, ensure_packaged_tokenizer
from agentspec.sidecar.traces import Problem

Target = Literal["model", "forced"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MIN_KV_BYTES = 64 << 20
_SPARE_TOKENS = 64  # of a request's room: no draft may reach the end of the model's context


class _ToolTimeParam(click.ParamType[ToolTime]):
    name = "dist"

    def convert(self, value: str | ToolTime, param: click.Parameter | None, ctx: click.Context | None) -> ToolTime:
        """Read the distribution; an unknown one is a bad option, exit code 2."""
        try:
            return value if isinstance(value, ToolTime) else parse_tool_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option(
    "--target",
    type=click.Choice(["model", "forced"]),
    default="forced",
    show_default=True,
    help="forced: the engine does its full work and writes what the traces say; model: it answers itself.",
)
@click.option(
    "--model",
    help="Folder or hub id; without weights they are random. [forced: Qwen2.5-0.5B, random;"
    " model: SmolLM2-135M-Instruct]",
)
@click.option("--warm", multiple=True, type=EXISTING, help="Traces of the past, a file or folder (repeat). [a share]")
@click.option("--eval", "evaluated", multiple=True, type=EXISTING, help="Traces to play (repeat). [the sample]")
@click.option(
    "--warm-share",
    type=click.FloatRange(0, 0.95),
    default=0.5,
    show_default=True,
    help="Share of the runs of --eval that are the past where --warm is not given.",
)
@click.option("--workload", multiple=True, help="Workloads to play (repeat). [all that are found]")
@click.option(
    "--batch-size",
    multiple=True,
    type=click.IntRange(1, 1024),
    default=(1, 8, 32),
    show_default=True,
    help="Agents at the same time (repeat).",
)
@click.option(
    "--method",
    multiple=True,
    type=click.Choice([*METHODS]),
    default=("plain", "agentspec"),
    show_default=True,
    help="(repeat); plain always runs beside them.",
)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=150, show_default=True, help="Of each engine in a cell.")
@click.option("--warm-up-steps", type=click.IntRange(0), default=20, show_default=True, help="Before those.")
@click.option(
    "--cell-seconds",
    type=click.FloatRange(1),
    default=900,
    show_default=True,
    help="A cell ends after so long, with fewer steps.",
)
@click.option(
    "--tool-time",
    type=_ToolTimeParam(),
    default="0",
    show_default=True,
    help="Wait between two calls of an agent: SECONDS, exp:MEAN or lognormal:MEDIAN:SIGMA.",
)
@click.option(
    "--decode-only/--end-to-end",
    "is_decode_only",
    default=None,
    help="Count prompts as computed, at their true length. [forced: decode only; model: end to end]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(4),
    default=512,
    show_default=True,
    help="Of each call's prompt, the last ones.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(2),
    default=256,
    show_default=True,
    help="Of each call's output, the first ones.",
)
@click.option("--tokenizer", type=FILE, help="A tokenizer.json. [the model's; of the random one: Qwen3's]")
@click.option("--dtype", type=click.Choice([*_BYTES]), default="bfloat16", show_default=True)
@click.option(
    "--max-engines",
    type=click.IntRange(2, 8),
    default=3,
    show_default=True,
    help="Alive at the same time; about 4 GB each.",
)
@click.option("--core", type=click.IntRange(0), help="CPU core of all engines. [the last one]")
@click.option(
    "--step-deadline",
    type=click.FloatRange(1),
    default=120,
    show_default=True,
    help="An engine whose step takes longer, in seconds, hangs.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Order of the runs.")
@click.option("--json", "json_path", type=OUTPUT, help="Keep the figures here, after each cell; a run goes on from it.")
def serve(  # noqa: PLR0917  # click passes the options by name
    target: Target,
    model: str | None,
    warm: tuple[Path, ...],
    evaluated: tuple[Path, ...],
    warm_share: float,
    workload: tuple[str, ...],
    batch_size: tuple[int, ...],
    method: tuple[str, ...],
    repeats: int,
    steps: int,
    warm_up_steps: int,
    cell_seconds: float,
    tool_time: ToolTime,
    is_decode_only: bool | None,
    prompt_tokens: int,
    output_tokens: int,
    tokenizer: Path | None,
    dtype: str,
    max_engines: int,
    core: int | None,
    step_deadline: float,
    seed: int,
    json_path: Path | None,
) -> None:
    """Play recorded agent runs on real vLLM engines in lockstep, one for each method, and compare them.

    Forced outputs are compared with the traces: any difference fails the cell. Failed cells are listed with the reason
    and the end of the engine's log, the others go on, and the exit code is 1.
    """
    is_forced = target == "forced"
    decode_only = is_forced if is_decode_only is None else is_decode_only
    if decode_only and not is_forced:
        raise click.UsageError("--decode-only needs --target forced: a model can't answer a prompt it has not read")
    with tempfile.TemporaryDirectory(prefix="agentspec-model-") as scratch:
        folder = _find_model(model, target, tokenizer, Path(scratch))
        loaded = tokenizer_or_exit(tokenizer or folder / "tokenizer.json")
        past, played = read_traces(warm, loaded), read_traces(evaluated or (SAMPLE,), loaded)
        problems = [*past.problems, *played.problems]
        config = _read_config(folder)
        _check_vocabulary(played, config, folder)
        past_calls, played_calls = _split(past, played, warm_share if not warm else None)
        cut = Cut(prompt_tokens, output_tokens)
        names = _choose(workload, played_calls, problems)
        workloads = _make_workloads(names, past_calls, played_calls, batch_sizes=batch_size, cut=cut, seed=seed)
        room = prompt_tokens + output_tokens + _SPARE_TOKENS
        settings = EngineSettings(
            kind=BASELINE,
            model=str(folder),
            load_format="auto" if has_weights(folder) else "dummy",
            dtype=dtype,
            is_forced=is_forced,
            is_decode_only=decode_only,
            max_batch_size=max(batch_size),
            max_model_len=room,
            kv_cache_bytes=max(_MIN_KV_BYTES, kv_bytes_per_token(config, _BYTES[dtype]) * room * max(batch_size)),
            core=max(os.sched_getaffinity(0)) if core is None else core,
        )
        plan = MatrixPlan(
            workloads=names,
            batch_sizes=tuple(dict.fromkeys(batch_size)),
            methods=tuple(dict.fromkeys(method)),
            num_repeats=repeats,
            num_steps=steps,
            num_warm_up_steps=warm_up_steps,
            max_cell_s=cell_seconds,
            max_engines=max_engines,
            tool_time=tool_time,
            step_deadline_s=step_deadline,
        )
        conditions = {
            "target": target,
            "model": model or ("Qwen2.5-0.5B shape, random weights" if is_forced else folder.name),
            "weights": settings.load_format,
            "dtype": dtype,
            "prefill": "skipped (decode only)" if decode_only else "included (end to end)",
            "clock": "CPU time of the engine's process on a CPU, wall time on a GPU; engines in lockstep on one core",
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "warm_up_steps": warm_up_steps,
            "tool_time": str(tool_time),
            "seed": seed,
            "max_batch_size": max(batch_size),
            "tokenizer_sha256": loaded.digest,
            "num_warm_tokens": sum(len(call.output) for call in past_calls),
            "num_eval_tokens": sum(len(call.output) for call in played_calls),
            "allocator": "tcmalloc" if find_allocator() else "system",
            "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
        }
        try:
            results = Results(json_path, conditions)
        except ResultsError as error:
            raise click.UsageError(str(error)) from None
        with cell_progress() as on_progress:
            matrix = Matrix(
                plan, settings, workloads, block_names=played.block_names, results=results, decode=loaded.decode
            )
            matrix.run(on_progress)
    _show(results, problems)


def _find_model(model: str | None, target: Target, tokenizer: Path | None, scratch: Path) -> Path:
    try:
        if model is None and target == "forced":
            found = tokenizer or ensure_packaged_tokenizer(QWEN3, cache_folder() / "tokenizers")
            return write_random_model(scratch / "model", found)
        folder = Path(resolve_model(model))
    except (ModelError, TokenizerError) as error:
        raise click.ClickException(str(error)) from None
    if not folder.is_dir():
        raise click.UsageError(f"--model {model}: expected a folder, whose tokenizer the traces are written with")
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{folder}/config.json: {error}") from None
    return config


def _check_vocabulary(played: Corpus, config: dict[str, Any], folder: Path) -> None:
    highest = max((int(call.output.max()) for call in played.calls), default=0)
    size = int(config.get("vocab_size", 0))
    if highest >= size:
        raise click.ClickException(
            f"{folder}: token id {highest} of the traces >= vocab_size {size}: another tokenizer?"
        )


def _split(past: Corpus, played: Corpus, warm_share: float | None) -> tuple[Sequence[TokenCall], Sequence[TokenCall]]:
    """Past and present; a run of the present is never in the past."""
    if warm_share is not None:
        return split_by_run(played.calls, warm_share)
    runs = {(call.workload, call.run_id) for call in played.calls}
    return [call for call in past.calls if (call.workload, call.run_id) not in runs], played.calls


def _choose(asked: Sequence[str], played: Sequence[TokenCall], problems: list[Problem]) -> tuple[str, ...]:
    found = sorted({call.workload for call in played})
    problems += [
        Problem(f"workload {name}", 0, f"no calls to play; there are: {', '.join(found) or 'none'}")
        for name in asked
        if name not in found
    ]
    return tuple(name for name in dict.fromkeys(asked or found) if name in found)


def _make_workloads(
    names: Sequence[str],
    past: Sequence[TokenCall],
    played: Sequence[TokenCall],
    *,
    batch_sizes: Sequence[int],
    cut: Cut,
    seed: int,
) -> dict[str, Workload]:
    return {
        name: make_workload(
            [call for call in past if call.workload == name],
            [call for call in played if call.workload == name],
            batch_sizes,
            cut,
            seed,
        )
        for name in names
    }


def _show(results: Results, problems: Sequence[Problem]) -> None:
    cells = results.cells()
    whole = [cell.record() for cell in cells if not cell.is_failed]
    if whole:
        print_table(output_console(), "served by vLLM, measured on this machine", SERVE_COLUMNS, whole)
    failed = [Problem(str(cell.key), 0, str(cell.figures["reason"])) for cell in cells if cell.is_failed]
    for cell in cells:
        if cell.is_failed:
            click.echo(f"{cell.key}: end of the engine's log\n{cell.figures['log_tail']}", err=True)
    finish([*problems, *failed])
