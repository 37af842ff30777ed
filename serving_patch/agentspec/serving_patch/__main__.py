"""`agentspec-vllm`: start vLLM with AgentSpec, print the flags that do it, or check the machine for it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from agentspec.sidecar.grammar_store import server_grammars
from agentspec.sidecar.options import ADDITIONAL_CONFIG_KEY, Options, OptionsError, read_options

from .compat import PROPOSER_CLS, SCHEDULER_CLS, CompatibilityError, check_version
from .compat_v2 import V2_SCHEDULERS, V2_SPEC_METHOD, V2_WORKER_CLS
from .doctor import Finding, examine
from .hook_choice import HookName, choose_hook

VLLM_MODULE = "vllm.entrypoints.cli.main"
ADDITIONAL_CONFIG = "--additional-config"
PIPELINE = "--pipeline-parallel-size"
MIN_ABBREVIATION = len("--spec")  # vLLM's parser takes unique prefixes of a flag

OURS = "AgentSpec brings its own; remove it"
CONFLICTS = {
    "--scheduler-cls": OURS,
    "--speculative-config": OURS,
    "--spec-method": OURS,
    "--spec-model": OURS,
    "--spec-tokens": 'set {"agentspec": {"num_speculative_tokens": N}} in --additional-config',
    "--worker-cls": OURS,
}
NO_ASYNC = "--no-async-scheduling"
V1_CONFLICTS = {
    "--async-scheduling": "with vLLM's V1 runner drafts must be known before the next step is scheduled; remove it",
}
SHORT_FLAGS = {"-sc": "--speculative-config", "-pp": PIPELINE}
PIPELINE_REASON = "vLLM cannot combine pipeline parallelism and speculation here; use -tp"


class FlagError(click.ClickException):
    """A flag of the user cannot go with AgentSpec; the message says why and what to do."""

    exit_code = 2


def build_flags(vllm_args: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Write the flags that make vLLM draft with AgentSpec, and keep those of the user.

    Args:
        vllm_args: flags of `vllm serve`; ``--additional-config`` is merged with ours.
        environ: where ``AGENTSPEC_*`` variables are.

    Raises:
        FlagError: a flag conflicts, or an option of AgentSpec is wrong.
    """
    kept, config, options = _split_flags(vllm_args, environ)
    is_async = all(flag != NO_ASYNC for flag, _, _ in _flags(vllm_args))
    return [*kept, *_our_flags(options, config, choose_hook(options.hook, environ).name, is_async=is_async)]


def _split_flags(vllm_args: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, Any], Options]:
    """The user's own flags, the merged `--additional-config`, and our options in it."""
    kept: list[str] = []
    config: dict[str, Any] = {}
    for flag, value, words in _flags(vllm_args):
        if flag in CONFLICTS:
            raise FlagError(f"{words[0]}: {CONFLICTS[flag]}")
        if flag == PIPELINE and value != "1":
            raise FlagError(f"{' '.join(words)}: {PIPELINE_REASON}")
        if flag == ADDITIONAL_CONFIG:
            config |= _read_json(value)
        else:
            kept += words
    options = _read_options(config.get(ADDITIONAL_CONFIG_KEY), environ)
    for flag, _, words in _flags(vllm_args):
        if flag in V1_CONFLICTS and choose_hook(options.hook, environ).name == "v1":
            raise FlagError(f"{words[0]}: {V1_CONFLICTS[flag]}")
    return kept, config, options


def read_flags(vllm_args: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Read the options of AgentSpec out of the flags of a `vllm serve`, and check the flags.

    Raises:
        FlagError: see `build_flags`.
    """
    return _split_flags(vllm_args, environ)[2]


def _our_flags(options: Options, config: Mapping[str, Any], hook: HookName, *, is_async: bool) -> list[str]:
    additional_config = {**config, ADDITIONAL_CONFIG_KEY: options.model_dump(mode="json", exclude_none=True)}
    speculative_config: dict[str, Any] = {"num_speculative_tokens": options.num_speculative_tokens}
    if hook == "v1":
        classes = ["--scheduler-cls", SCHEDULER_CLS]
        speculative_config |= {"method": "custom_class", "model": PROPOSER_CLS}
    else:
        classes = ["--worker-cls", V2_WORKER_CLS, "--scheduler-cls", V2_SCHEDULERS[is_async]]
        speculative_config |= {"method": V2_SPEC_METHOD, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    return [
        *classes,
        *("--speculative-config", json.dumps(speculative_config)),
        *(ADDITIONAL_CONFIG, json.dumps(additional_config)),
    ]


def _flags(vllm_args: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Split a command line into (full name or "", value or "", words); only flags that matter to us have a name."""
    rest = list(vllm_args)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        base, is_dotted, _ = name.partition(".")
        flag = _full_name(base)
        if is_dotted and flag == ADDITIONAL_CONFIG:
            raise FlagError(f"{word}: write {ADDITIONAL_CONFIG} as one JSON object, so that it can be merged")
        if has_value or flag not in (ADDITIONAL_CONFIG, PIPELINE):
            yield flag, value, [word]
        elif rest:
            value = rest.pop(0)
            yield flag, value, [word, value]
        else:
            raise FlagError(f"{word}: expected a value")


def _full_name(name: str) -> str:
    """The flag of ours that vLLM's parser would take a name for: underscores, unique prefixes, short forms."""
    name = SHORT_FLAGS.get(name, name.replace("_", "-"))
    if len(name) < MIN_ABBREVIATION:
        return ""
    known = (*CONFLICTS, *V1_CONFLICTS, NO_ASYNC, ADDITIONAL_CONFIG, PIPELINE)
    return name if name in known else next((flag for flag in known if flag.startswith(name)), "")


def _read_json(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise FlagError(f"{ADDITIONAL_CONFIG}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise FlagError(f"{ADDITIONAL_CONFIG}: expected a JSON object, got {type(config).__name__}")
    return config


def _read_options(config: object, environ: Mapping[str, str]) -> Options:
    if config is not None and not isinstance(config, dict):
        raise FlagError(f"{ADDITIONAL_CONFIG}: expected an object under {ADDITIONAL_CONFIG_KEY!r}, got {config!r}")
    try:
        options = read_options(config, environ)
        server_grammars(options)  # a bad file must stop us before vLLM loads the model
        return options
    except OptionsError as error:
        raise FlagError(str(error)) from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Serve a model with vLLM, drafting from the histories that the agents of a workflow share.

    Options of AgentSpec come from AGENTSPEC_* variables (AGENTSPEC_POLICY=off) or from
    --additional-config '{"agentspec": {"policy": "off"}}', which wins.
    """


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=True)
@click.argument("model")
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED)
def serve(model: str, vllm_args: tuple[str, ...]) -> None:
    """Start `vllm serve MODEL` with AgentSpec; all other flags go through to vLLM.

    MODEL comes first. Flags that cannot go with AgentSpec are refused with the reason.
    `agentspec-vllm serve MODEL --help` shows vLLM's own flags.
    """
    if model.startswith("-"):
        raise FlagError(f"{model}: give the model first, as in `agentspec-vllm serve MODEL {model}`")
    try:
        check_version()
    except CompatibilityError as error:
        raise FlagError(str(error)) from None
    command = [sys.executable, "-m", VLLM_MODULE, "serve", model, *build_flags(vllm_args)]
    os.execv(sys.executable, command)  # noqa: S606  # vLLM takes our place, so that signals reach it


@main.command()
def flags() -> None:
    """Print the flags that `serve` adds, to paste behind `vllm serve MODEL`."""
    words = build_flags(())
    for name, value in zip(words[::2], words[1::2], strict=True):
        click.echo(f"{name} {shlex.quote(value)}")


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("model", required=False, default="")
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED)
def doctor(model: str, vllm_args: tuple[str, ...]) -> None:
    """Check this machine for `agentspec-vllm serve MODEL`, and say what to do.

    Looks at packages, ports, vLLM's version and scheduler and, with a MODEL, at its tokenizer and chat template. Takes
    the flags of `serve`. Exit code 2 when the engine would not start.
    """
    findings = list(_shown(examine(read_flags(vllm_args), model)))
    if any(finding.status == "fail" for finding in findings):
        raise SystemExit(FlagError.exit_code)


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    for finding in findings:
        click.echo(f"{finding.status:5}{finding.subject}: {finding.detail}")
        if finding.fix:
            click.echo(f"     -> {finding.fix}")
        yield finding


if __name__ == "__main__":
    main()
