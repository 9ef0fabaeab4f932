"""The example trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

UNET = Path(__file__).parent.parent / "examples" / "unet.py"


def run(*options, **environment):
    command = [sys.executable, str(UNET), "--voxel", "0.4", "--channels", "4", "8", "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", **environment})


def test_the_unet_trains_on_a_room_of_its_own():
    done = run("--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr
    assert "voxels of 0.4 m on cpu" in done.stdout


def test_the_unet_says_which_clouds_there_are(tmp_path):
    done = run("--cloud", "hall", INSUM_DATA=str(tmp_path))
    assert done.stderr.strip() == f"no cloud hall in {tmp_path / 'clouds'}; there are none"
    done = run("--cloud", "hall")
    assert done.stderr.strip() == "--cloud hall needs INSUM_DATA, the folder whose clouds/ holds hall.npz"
