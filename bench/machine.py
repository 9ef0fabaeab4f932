"""What a result depends on besides the code: GPU, driver, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata

import torch

__all__ = ["machine", "slug"]

PACKAGES = (
    *("torch", "triton", "numpy", "e3nn", "torch-geometric", "spconv", "spconv-cu126"),
    *("cuequivariance-torch", "cuequivariance-ops-torch-cu12", "cuequivariance-ops-torch-cu13"),
)


def machine() -> dict[str, object]:
    """Facts for a results file; nothing that names a person or a host."""
    facts: dict[str, object] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver() if torch.cuda.is_available() else "none",
        "cuda": torch.version.cuda or "none",
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    return facts


def slug(facts: dict[str, object]) -> str:
    """The name under which a run of such a machine is stored: times of two kinds of machines are not compared.

    >>> slug({"gpu": "NVIDIA H200"}), slug({"gpu": "none", "architecture": "aarch64", "threads": 2})
    ('nvidia-h200', 'cpu-aarch64-2')
    """
    gpu = str(facts.get("gpu", "none"))
    name = gpu if gpu != "none" else f"cpu-{facts.get('architecture')}-{facts.get('threads')}"
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.split("\n")[0].strip() if answer.returncode == 0 else "unknown"
