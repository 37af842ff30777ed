"""`agentspec-vllm`: which flags it writes, merges, keeps and refuses."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentspec.serving_patch import __main__ as command_line
from agentspec.serving_patch.__main__ import FlagError, build_flags, main
from agentspec.serving_patch.compat import PROPOSER_CLS, SCHEDULER_CLS
from agentspec.serving_patch.compat_v2 import V2_WORKER_CLS
from agentspec.serving_patch.hook_choice import choose_hook


def value_of(words: list[str], flag: str) -> Any:
    assert words.count(flag) == 1
    return json.loads(words[words.index(flag) + 1])


def test_flags_name_scheduler_proposer_and_options() -> None:
    words = build_flags([], {})

    assert words[words.index("--scheduler-cls") + 1] == SCHEDULER_CLS
    assert value_of(words, "--speculative-config") == {
        "method": "custom_class",
        "model": PROPOSER_CLS,
        "num_speculative_tokens": 16,
    }
    assert value_of(words, "--additional-config")["agentspec"]["policy"] == "goodput"


def test_flags_of_hook_v2_name_worker_scheduler_and_an_asynchronous_method() -> None:
    words = build_flags([], {"AGENTSPEC_HOOK": "v2"})

    assert words[words.index("--worker-cls") + 1] == V2_WORKER_CLS
    assert words[words.index("--scheduler-cls") + 1].endswith("AgentSpecAsyncScheduler")
    assert value_of(words, "--speculative-config")["method"] == "ngram_gpu"


def test_hook_v2_takes_both_ways_of_scheduling() -> None:
    synchronous = build_flags(["--no-async-scheduling"], {"AGENTSPEC_HOOK": "v2"})

    assert synchronous[synchronous.index("--scheduler-cls") + 1].endswith("AgentSpecSyncScheduler")
    assert "--async-scheduling" in build_flags(["--async-scheduling"], {"AGENTSPEC_HOOK": "v2"})


@pytest.mark.parametrize(
    ("asked", "environ", "is_gpu", "name"),
    [
        ("auto", {}, True, "v2"),
        ("auto", {}, False, "v1"),
        ("auto", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, True, "v1"),
        ("auto", {"VLLM_USE_V2_MODEL_RUNNER": "1"}, False, "v2"),
        ("v1", {}, True, "v1"),
        ("v2", {}, False, "v2"),
    ],
)
def test_hook_is_that_of_the_runner_that_vllm_takes(
    asked: Any, environ: dict[str, str], is_gpu: bool, name: str
) -> None:
    choice = choose_hook(asked, environ, lambda: is_gpu)

    assert choice.name == name
    assert choice.reason
    assert choice.price


def test_flags_of_the_user_are_kept_in_order() -> None:
    given = [
        "--port",
        "8001",
        "-tp",
        "2",
        "--chat-template=x.jinja",
        "--no-async-scheduling",
        "-pp",
        "1",
        "--flag.a",
        "b",
    ]

    assert build_flags(given, {})[: len(given)] == given


def test_additional_config_of_the_user_is_merged() -> None:
    config = {"other": {"x": 1}, "agentspec": {"policy": "off", "num_speculative_tokens": 5}}
    words = build_flags(["--additional-config", json.dumps(config), "--port", "1"], {})
    merged = value_of(words, "--additional-config")

    assert merged["other"] == {"x": 1}
    assert (merged["agentspec"]["policy"], merged["agentspec"]["num_speculative_tokens"]) == ("off", 5)
    assert value_of(words, "--speculative-config")["num_speculative_tokens"] == 5


def test_folder_of_grammars_is_passed_on(tmp_path: Path) -> None:
    words = build_flags(["--additional-config", json.dumps({"agentspec": {"grammars_dir": str(tmp_path)}})], {})

    assert value_of(words, "--additional-config")["agentspec"]["grammars_dir"] == str(tmp_path)


def test_options_come_from_the_environment() -> None:
    words = build_flags(["--additional_config={}"], {"AGENTSPEC_NUM_SPECULATIVE_TOKENS": "7"})

    assert value_of(words, "--speculative-config")["num_speculative_tokens"] == 7


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-config", "{}"],
        ["--speculative_config={}"],
        ["--speculative-config.method", "ngram"],
        ["--speculative", "{}"],
        ["-sc", "{}"],
        ["--spec-method", "ngram"],
        ["--spec-tokens", "4"],
        ["--scheduler-cls", "x.Y"],
        ["--async-scheduling"],
        ["--async_scheduling"],
        ["--pipeline-parallel-size", "2"],
        ["-pp", "2"],
        ["-pp=2"],
        ["--pipeline-parallel-size"],
        ["--additional-config.agentspec.policy", "off"],
        ["--additional-config", "{"],
        ["--additional-config", "[]"],
        ["--additional-config"],
        ["--additional-config", '{"agentspec": 3}'],
        ["--additional-config", '{"agentspec": {"grammars_dir": "/no/such/folder"}}'],
        ["--additional-config", '{"agentspec": {"polcy": "off"}}'],
        ["--additional-config", '{"agentspec": {"num_speculative_tokens": 65}}'],
    ],
)
def test_flag_that_cannot_go_with_ours_is_refused(given: list[str]) -> None:
    with pytest.raises(FlagError) as caught:
        build_flags(["--port", "1", *given], {})

    assert caught.value.exit_code == 2
    assert len(str(caught.value)) > len(given[0])


def test_wrong_variable_of_the_environment_is_refused() -> None:
    with pytest.raises(FlagError, match="metrics_port"):
        build_flags([], {"AGENTSPEC_METRICS_PORT": "http"})


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def test_printed_flags_survive_a_shell() -> None:
    result = run("flags")

    assert result.exit_code == 0
    assert shlex.split(result.output) == build_flags([], os.environ)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `serve` would have become."""
    calls: list[list[str]] = []
    monkeypatch.setattr(command_line, "check_version", lambda: "0.32.0")
    monkeypatch.setattr(os, "execv", lambda _, words: calls.append(words))
    return calls


def test_serve_becomes_vllm_serve_of_the_same_interpreter(executed: list[list[str]]) -> None:
    result = run("serve", "some/model", "--port", "8001", "--help")

    assert result.exit_code == 0
    assert executed[0][:7] == [sys.executable, "-m", command_line.VLLM_MODULE, "serve", "some/model", "--port", "8001"]
    assert "--help" in executed[0]
    assert "--scheduler-cls" in executed[0]


@pytest.mark.parametrize("args", [("serve",), ("serve", "--port", "1", "m"), ("serve", "m", "--async-scheduling")])
def test_serve_ends_with_code_2_and_a_message(args: tuple[str, ...], executed: list[list[str]]) -> None:
    result = run(*args)

    assert result.exit_code == 2
    assert "Error: " in result.output
    assert executed == []


def test_serve_refuses_a_vllm_that_is_not_supported(executed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    from agentspec.serving_patch.compat import check_version  # noqa: PLC0415  # before it is replaced

    monkeypatch.setattr(command_line, "check_version", lambda: check_version("0.19.0"))
    result = run("serve", "m")

    assert result.exit_code == 2
    assert "vLLM 0.19.0 is not supported; install vllm>=0.32,<0.34" in result.output
    assert executed == []


@pytest.mark.parametrize("args", [("--help",), ("serve", "--help"), ("flags", "--help"), ("doctor", "--help")])
def test_every_command_has_help(args: tuple[str, ...]) -> None:
    result = run(*args)

    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")
