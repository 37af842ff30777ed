"""Writes what is made from the chart: its table of values and the Kustomize base; `make deploy-files`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from tests.chart import CHART, KUSTOMIZE, render, without_helm

README = CHART / "README.md"
BASE = KUSTOMIZE / "base/release.yaml"
TABLE = re.compile(r"(?<=<!-- values: made by `make deploy-files` -->\n).*?(?=<!-- end of values -->)", re.DOTALL)
_LINE = re.compile(r"^(?P<indent> *)(?:# -- (?P<comment>.*)|(?P<key>[A-Za-z]+):(?: (?P<value>.*))?)$")


def values_table() -> str:
    """A row for each value of `values.yaml` that has a comment."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | what it is |", "| --- | --- | --- |"]
    path: list[str] = []
    comment = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        if match["comment"]:
            comment = match["comment"]
            continue
        path = [*path[: len(match["indent"]) // 2], match["key"]]
        default = values
        for key in path:
            default = default[key] if isinstance(default, dict) and key in default else None
        if comment:
            rows.append(f"| `{'.'.join(path)}` | `{json.dumps(default)}` | {comment} |")
        comment = ""
    return "\n".join(rows) + "\n"


def base_manifests() -> str:
    """The chart's objects without Helm's labels, the test and its values."""
    manifests = without_helm(render(CHART / "ci/base.yaml", "--skip-tests"))
    return "# Made from the chart by `make deploy-files`.\n" + yaml.safe_dump_all(manifests, sort_keys=False)


def expected_files() -> dict[Path, str]:
    """What each made file is to hold."""
    return {README: TABLE.sub(lambda _: values_table(), README.read_text()), BASE: base_manifests()}


if __name__ == "__main__":
    for path, text in expected_files().items():
        path.write_text(text)
