"""Says whether the torch that pip would install is a CPU build: exit code 0 if so, else 1.

Usage: torch_build.py REPORT, where REPORT is what `pip install --dry-run --report REPORT torch` wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version

CUDA_PREFIXES = ("nvidia-", "cuda-")


def is_cpu_build(report: dict[str, Any]) -> bool:
    """Tell a CPU build of torch by its local version, or by the absence of CUDA libraries among what it requires.

    Args:
        report: pip's installation report, version 1.
    """
    torch = next((entry["metadata"] for entry in report["install"] if entry["metadata"]["name"] == "torch"), None)
    if torch is None:
        return False
    local = Version(torch["version"]).local
    if local is not None:
        return local.startswith("cpu")
    requirements = map(Requirement, torch.get("requires_dist", []))
    needed = [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return not any(name.startswith(CUDA_PREFIXES) for name in needed)


if __name__ == "__main__":
    sys.exit(not is_cpu_build(json.loads(Path(sys.argv[1]).read_text())))
