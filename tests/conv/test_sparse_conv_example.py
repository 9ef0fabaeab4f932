"""The example trains."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

UNET = Path(__file__).parents[2] / "examples" / "unet.py"


OPTIONS = ["--voxel", "0.4", "--channels", "4", "8", "--device", "cpu"]


def test_the_unet_trains_on_a_room_of_its_own_and_draws_what_it_learned(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    command = [sys.executable, str(UNET), *OPTIONS, "--steps", "3", "--picture", str(tmp_path / "room.png")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSUM")}
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr
    assert "voxels of 0.4 m on cpu" in done.stdout
    assert done.stdout.endswith(f"wrote {tmp_path / 'room.png'}\n")
    pixels = image.imread(tmp_path / "room.png")[..., :3]
    assert 0.01 < (pixels != 1).any(axis=2).mean() < 0.9
    assert (pixels.max(axis=2) - pixels.min(axis=2) > 0.3).any(), "no label has its colour"


@pytest.mark.parametrize(
    ("has_folder", "text"),
    [
        (True, "no cloud hall in {}/clouds; there are none"),
        (False, "--cloud hall needs INSUM_DATA, the folder whose clouds/ holds hall.npz"),
    ],
)
def test_the_unet_says_which_clouds_there_are(has_folder, text, tmp_path, monkeypatch):
    monkeypatch.delenv("INSUM_DATA", raising=False)
    if has_folder:
        monkeypatch.setenv("INSUM_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(UNET), *OPTIONS, "--cloud", "hall"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(UNET), run_name="__main__")
    assert ended.value.code == text.format(tmp_path)
