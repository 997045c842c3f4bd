"""Tells one chaos story after the other, each from a new seed, until the time is over or one goes wrong."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

_TEST: Final = Path(__file__).with_name("test_chaos.py")
_OUTPUT: Final = Path("chaos-output")


def main(minutes: float) -> int:
    """Returns an exit status; logs and data of a story that went wrong are kept."""
    deadline = time.monotonic() + 60 * minutes
    told = 0
    while time.monotonic() < deadline:
        seed, began = secrets.randbelow(2**31), time.monotonic()
        folder = _OUTPUT / f"seed-{seed}"
        _OUTPUT.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(_TEST), f"--basetemp={folder}"],
            env={**os.environ, "ROLLCAST_CHAOS_SEED": str(seed)},
            check=False,
        )
        if done.returncode != 0:
            _say(f"seed {seed} went wrong; its logs and data are in {folder}")
            _say(f"again: ROLLCAST_CHAOS_SEED={seed} python -m pytest {_TEST}")
            return done.returncode
        shutil.rmtree(folder)
        told += 1
        _say(f"seed {seed} went well, in {time.monotonic() - began:.0f} s; {told} so far")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
