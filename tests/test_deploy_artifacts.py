"""Images, manifests, dashboard and alerts: linted, made from what they say they are, true to what the code exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart import CHART, KUSTOMIZE, PROJECT, TOOLS, kustomize, render, run_tool, without_helm
from tests.deploy_files import expected_files

pytestmark = pytest.mark.deploy

ALERTS = CHART / "files/alerts.yaml"
DASHBOARD = CHART / "files/dashboard.json"
METRIC = re.compile(r"\bagentspec_[a-z_]+\b")


@pytest.fixture(autouse=True)
def _tools() -> None:
    assert TOOLS.is_dir(), "run `make deploy-test`: it fetches promtool, hadolint and others"


def readme_metrics() -> set[str]:
    """Metrics of the README's table, which tests compare with what an engine exports."""
    section = (PROJECT / "README.md").read_text().partition("### Metrics")[2].partition("\n## ")[0]
    return {name for line in section.splitlines() if line.startswith("| `agentspec_") for name in METRIC.findall(line)}


def test_alerts_and_dashboard_name_only_exported_metrics() -> None:
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]

    named = {name for text in [*rules, *panels] for name in METRIC.findall(text)}

    assert len(named) >= 10
    assert named <= readme_metrics()


def test_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    exprs = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    run = run_tool("promtool", "check", "rules", tmp_path / "rules.yaml")

    assert run.code == 0, run.stderr + run.stdout


def test_panels_have_a_title_of_their_own_and_a_place_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]

    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


POD = 'namespace="team", pod="a"'
# Series a minute over two hours, by alert: those that raise it and those that look alike and do not.
RAISED: dict[str, dict[str, str]] = {
    "AgentSpecBug": {f'agentspec_fallbacks_total{{{POD}, reason="hook_error"}}': "0+1x120"},
    "AgentSpecDraftsLate": {
        f'agentspec_fallbacks_total{{{POD}, reason="deadline"}}': "0+60x120",
        f'agentspec_fallbacks_total{{{POD}, reason="bad_tags"}}': "0+10x120",
    },
    "AgentSpecNoDrafts": {
        f"agentspec_steps_total{{{POD}}}": "0+600x120",
        f"agentspec_drafts_total{{{POD}}}": "0+0x120",
    },
    "AgentSpecLowAcceptance": {
        f"agentspec_draft_tokens_total{{{POD}}}": "0+600x120",
        f"agentspec_accepted_tokens_total{{{POD}}}": "0+60x120",
    },
    "AgentSpecSlowerThanPlain": {
        f"agentspec_saved_seconds{{{POD}}}": "0-1x120",
        f"agentspec_step_seconds_total{{{POD}}}": "0+30x120",
    },
    "AgentSpecTagsRefused": {f'agentspec_fallbacks_total{{{POD}, reason="bad_tags"}}': "0+10x120"},
    "AgentSpecRequestsLeak": {
        f"agentspec_open_requests{{{POD}}}": "3+0x120",
        f"agentspec_steps_total{{{POD}}}": "500+0x120",
    },
    "AgentSpecSidecarDown": {f"agentspec_sidecar_connected{{{POD}}}": "0+0x120"},
    "AgentSpecHistoriesNotShared": {
        f'agentspec_hybrid_connected{{{POD}, direction="sent"}}': "1+0x120",
        f'agentspec_hybrid_connected{{{POD}, direction="received"}}': "0+0x120",
    },
    "AgentSpecSharedTextLost": {f"agentspec_redis_dropped_tokens_total{{{POD}}}": "0+10x120"},
    "AgentSpecForeignEntries": {f'agentspec_redis_skipped_total{{{POD}, reason="key"}}': "0+10x120"},
}
QUIET: dict[str, dict[str, str]] = {
    "AgentSpecBug": {f'agentspec_fallbacks_total{{{POD}, reason="deadline"}}': "0+1x120"},
    "AgentSpecDraftsLate": {
        f'agentspec_fallbacks_total{{{POD}, reason="deadline"}}': "0+60x120",
        f'agentspec_fallbacks_total{{{POD}, reason="bad_tags"}}': "0+600x120",
    },
    "AgentSpecNoDrafts": {
        f"agentspec_steps_total{{{POD}}}": "0+600x120",
        f"agentspec_drafts_total{{{POD}}}": "0+1x120",
    },
    "AgentSpecLowAcceptance": {
        f"agentspec_draft_tokens_total{{{POD}}}": "0+600x120",
        f"agentspec_accepted_tokens_total{{{POD}}}": "0+180x120",
    },
    "AgentSpecSlowerThanPlain": {
        f"agentspec_saved_seconds{{{POD}}}": "0-0.01x120",
        f"agentspec_step_seconds_total{{{POD}}}": "0+30x120",
    },
    "AgentSpecTagsRefused": {f'agentspec_fallbacks_total{{{POD}, reason="deadline"}}': "0+10x120"},
    "AgentSpecRequestsLeak": {
        f"agentspec_open_requests{{{POD}}}": "3+0x120",
        f"agentspec_steps_total{{{POD}}}": "500+1x120",
    },
    "AgentSpecSidecarDown": {f"agentspec_sidecar_connected{{{POD}}}": "0 1+0x119"},
    "AgentSpecHistoriesNotShared": {
        f"agentspec_redis_connected{{{POD}}}": "1+0x120",
        f'agentspec_hybrid_connected{{{POD}, direction="received"}}': "1+0x110 0+0x9",
    },
    "AgentSpecSharedTextLost": {
        f"agentspec_redis_dropped_tokens_total{{{POD}}}": "7+0x120",
        f'agentspec_hybrid_lost_tokens_total{{{POD}, direction="sent"}}': "0+0x120",
    },
    "AgentSpecForeignEntries": {f'agentspec_redis_skipped_total{{{POD}, reason="stale"}}': "0+10x120"},
}


def alert_rules() -> dict[str, Any]:
    """Each alert's rule by its name."""
    return {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


def expand(text: str, labels: dict[str, str]) -> str:
    """An annotation with its labels filled in."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)


def raised_labels(rule: Any, series: str) -> dict[str, str]:
    """Labels that an alert carries: those that its expression keeps."""
    kept = re.search(r"by \(([^)]*)\)", rule["expr"])
    labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
    return {name: labels[name] for name in kept[1].split(", ")} if kept else labels


@pytest.mark.parametrize("alert", sorted(alert_rules()))
def test_alert_rises_when_it_should_and_not_otherwise(alert: str, tmp_path: Path) -> None:
    rule = alert_rules()[alert]
    labels = raised_labels(rule, next(iter(RAISED[alert])))
    annotations = {name: expand(text, labels) for name, text in rule["annotations"].items()}
    expected = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": steps} for name, steps in series.items()],
            "alert_rule_test": [{"eval_time": "2h", "alertname": alert, "exp_alerts": alerts}],
        }
        for series, alerts in ((RAISED[alert], [expected]), (QUIET[alert], []))
    ]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))

    run = run_tool("promtool", "test", "rules", tmp_path / "test.yaml")

    assert run.code == 0, run.stdout + run.stderr


def test_each_alert_has_a_paragraph_on_the_operations_page() -> None:
    page = (PROJECT / "deploy/README.md").read_text()

    assert [name for name in alert_rules() if f"`{name}`" not in page] == []


def test_made_files_are_fresh() -> None:
    stale = [path.name for path, text in expected_files().items() if path.read_text() != text]

    assert stale == [], "run `make deploy-files`"


@pytest.mark.parametrize("overlay", ["gpu", "cpu"])
def test_overlay_renders_what_the_chart_renders(overlay: str) -> None:
    chart = without_helm(render(CHART / f"ci/{overlay}.yaml", "--skip-tests"))

    assert without_helm(kustomize(f"overlays/{overlay}")) == chart


@pytest.mark.parametrize("image", ["sidecar", "vllm"])
def test_dockerfile_is_clean(image: str) -> None:
    run = run_tool("hadolint", PROJECT / f"deploy/docker/{image}.Dockerfile")

    assert (run.code, run.stdout) == (0, "")


def test_yaml_is_clean() -> None:
    unruled = ("line-length", "document-start", "comments", "indentation")
    rules = json.dumps({"extends": "default", "rules": dict.fromkeys(unruled, "disable")})
    files = [
        *CHART.glob("*.yaml"),
        *CHART.glob("ci/*.yaml"),
        ALERTS,
        *KUSTOMIZE.rglob("*.yaml"),
        *PROJECT.glob("deploy/routing/*.yaml"),
    ]

    run = run_tool("yamllint", "--strict", "-d", rules, *files)

    assert (run.code, run.stdout) == (0, "")
