"""The configuration table: sources, precedence and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentspec.sidecar.grammar_store import server_grammars
from agentspec.sidecar.options import Options, OptionsError, read_options
from agentspec.sidecar.server_options import ServerOptions


def test_defaults_are_those_of_the_table() -> None:
    options = read_options({}, {})

    assert options == Options()
    assert (options.namespace, options.num_speculative_tokens, options.policy) == ("default", 16, "goodput")
    assert (options.deadline_ms, options.history_bytes, options.metrics_port) == (None, 1 << 30, 9464)


def test_sidecar_mode_finds_the_server_where_it_listens_by_default() -> None:
    options = read_options({"mode": "sidecar"}, {})

    assert options.socket == ServerOptions.model_validate({}).socket


def test_variable_of_the_environment_is_read_as_text() -> None:
    options = read_options(None, {"AGENTSPEC_NUM_SPECULATIVE_TOKENS": "8", "AGENTSPEC_POLICY": "off"})

    assert (options.num_speculative_tokens, options.policy) == (8, "off")


def test_mapping_wins_over_the_environment() -> None:
    assert read_options({"policy": "redundancy"}, {"AGENTSPEC_POLICY": "off"}).policy == "redundancy"


def test_variable_that_names_no_option_is_not_ours() -> None:
    assert read_options({}, {"AGENTSPEC_CACHE": "/x", "AGENTSPEC_PURE": "1"}) == Options()


def test_folder_of_grammars_is_read_by_id(tmp_path: Path) -> None:
    (tmp_path / "plans.json").write_text('{"blocks": [{"name": "plan", "start": "<p>", "end": "</p>"}]}')
    options = read_options({"grammars_dir": str(tmp_path)}, {})

    assert list(server_grammars(options)) == ["plans"]
    assert server_grammars(Options()) == {}


@pytest.mark.parametrize("name", ["missing", "bad"])
def test_folder_of_grammars_that_cannot_be_read_names_option_and_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.json").write_text('{"blocks": 3}')

    with pytest.raises(OptionsError, match=f"'grammars_dir'.*{name}"):
        server_grammars(Options(grammars_dir=tmp_path / name))


def test_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_NAMESPACE", "team-a")

    assert read_options().namespace == "team-a"


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("num_speculative_tokens", [1, 64]),
        ("arithmetic_intensity", [1, 1 << 20]),
        ("deadline_ms", [0.1, 10_000, None]),
        ("history_bytes", [1 << 20, 1 << 42]),
        ("namespace_bytes", [1 << 20, 1 << 30, None]),
        ("stored_tokens_per_s", [1, 1e9]),
        ("ttl_s", [0.5, 1e9]),
        ("metrics_port", [0, 65535]),
        ("otlp_endpoint", ["http://collector:4317", "https://collector.example:4317/"]),
        ("namespace", ["a", "team-a.prod_1", "x" * 256]),
        ("isolation", ["soft", "strict"]),
        ("policy", ["goodput", "redundancy", "uniform", "fixed", "off", "shadow"]),
    ],
)
def test_bounds_are_taken(name: str, good: list[Any]) -> None:
    for value in good:
        assert getattr(read_options({name: value}, {}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 65),
        ("num_speculative_tokens", "many"),
        ("arithmetic_intensity", 0),
        ("arithmetic_intensity", float("nan")),
        ("arithmetic_intensity", -3),
        ("deadline_ms", 0),
        ("deadline_ms", float("nan")),
        ("deadline_ms", float("inf")),
        ("ttl_s", 0),
        ("ttl_s", float("inf")),
        ("history_bytes", 0),
        ("history_bytes", 1),
        ("history_bytes", 1 << 43),
        ("namespace_bytes", 0),
        ("namespace_bytes", (1 << 30) + 1),
        ("stored_tokens_per_s", 0),
        ("stored_tokens_per_s", float("inf")),
        ("metrics_port", 65536),
        ("metrics_port", -1),
        ("otlp_endpoint", "collector:4317"),
        ("otlp_endpoint", "http://collector:4317/v1/metrics"),
        ("namespace", ""),
        ("namespace", "a/b"),
        ("namespace", "x" * 257),
        ("policy", "fastest"),
        ("isolation", "hard"),
        ("mode", "remote"),
        ("socket", "/" + "x" * 107),
        ("colour", "red"),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionsError, match=f"agentspec option '{name}': "):
        read_options({name: value}, {})


def test_wrong_variable_of_the_environment_is_refused_by_name() -> None:
    with pytest.raises(OptionsError, match=r"agentspec option 'metrics_port': .*got 'http'"):
        read_options({}, {"AGENTSPEC_METRICS_PORT": "http"})
