"""What tests of compiled kernels share: their builder, and caches of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import building
import pytest

from insum_ops.compiler.tuning.problem import Candidate, Problem


@pytest.fixture(scope="session")
def build() -> Callable[[Problem, Candidate, int], building.Built]:
    return building.build


@pytest.fixture(autouse=True, scope="module")
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither an earlier run nor the user's caches decide what is compiled here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_CACHE_DIR", "INSUM_CACHE_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield
