"""The middleware as a LangGraph developer gets it: a pure-Python wheel, made and used without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PROGRAM = """
import agentspec.middleware, sys
assert agentspec.middleware.__file__.startswith(sys.argv[1]), agentspec.middleware.__file__
agentspec.middleware.AgentSpecMiddleware(workflow_id="wf")
assert "agentspec.sidecar" not in sys.modules
print("works")
"""


@pytest.mark.slow
def test_a_pure_wheel_needs_no_compiler_and_works_alone(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    no_compiler = {"CC": "/bin/false", "CXX": "/bin/false", "AGENTSPEC_PURE": "1", "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(PROJECT)], env={**os.environ, **no_compiler}, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")

    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"{site_code()}{PROGRAM}", str(tmp_path / "site")],
        env={**os.environ, "PYTHONPATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert ran.stdout.strip() == "works", ran.stderr


def site_code() -> str:
    """Makes the installed packages importable without their `.pth` files, so without the editable install of ours."""
    folders = [path for path in sys.path if path.endswith("site-packages")]
    return f"import sys\nsys.path[:0] = [sys.argv[1]]\nsys.path.extend({folders!r})\n"
