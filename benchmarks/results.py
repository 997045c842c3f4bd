"""Where a benchmark's numbers go, with what one must know to judge them."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def write(name: str, numbers: Any) -> None:
    """Writes `results/<name>.json`: the numbers, the machine and the commit."""
    out = Path(__file__).parent / "results" / f"{name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": _machine(), "commit": _commit(), **numbers}, indent=2) + "\n")


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "processor": _processor(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return described.stdout.strip()
