"""What a memory holds of calls like ones before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from insum_ops.compiler.express import SETTINGS


def calls(memory: Mapping[Any, Any]) -> dict[Any, Any]:
    """Calls by their whole keys; under the beginnings of these a memory holds which of them came last."""
    return {key: found for key, found in memory.items() if len(key) > len(SETTINGS)}
