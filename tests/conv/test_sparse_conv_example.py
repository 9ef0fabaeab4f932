"""The example trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

UNET = Path(__file__).parents[2] / "examples" / "unet.py"


def run(*options, **environment):
    command = [sys.executable, str(UNET), "--voxel", "0.4", "--channels", "4", "8", "--device", "cpu", *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSUM")}
    variables = {**kept, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def test_the_unet_trains_on_a_room_of_its_own():
    done = run("--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr
    assert "voxels of 0.4 m on cpu" in done.stdout


def test_the_unet_draws_what_it_learned(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    done = run("--steps", "2", "--picture", str(tmp_path / "room.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"wrote {tmp_path / 'room.png'}\n")
    pixels = image.imread(tmp_path / "room.png")[..., :3]
    assert 0.01 < (pixels != 1).any(axis=2).mean() < 0.9
    assert (pixels.max(axis=2) - pixels.min(axis=2) > 0.3).any(), "no label has its colour"


def test_the_unet_says_which_clouds_there_are(tmp_path):
    done = run("--cloud", "hall", INSUM_DATA=str(tmp_path))
    assert done.stderr.strip() == f"no cloud hall in {tmp_path / 'clouds'}; there are none"
    done = run("--cloud", "hall")
    assert done.stderr.strip() == "--cloud hall needs INSUM_DATA, the folder whose clouds/ holds hall.npz"
