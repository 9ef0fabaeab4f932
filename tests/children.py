"""Functions run in a forked process, as another user if need be, and their errors brought back."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534
SECONDS = 60  # after which a child that hangs is ended


def in_child(run: Callable[[], object], user: int | None = None) -> None:
    """Run a function in a fork of this process; what it raises is raised here, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            run()
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        problem = pipe.read()
    _, status = os.waitpid(child, 0)
    assert not problem, f"in a child process: {problem}"
    assert status == 0, f"the child process ended with status {status}"


def as_another_user(run: Callable[[], object]) -> None:
    """Run a function in a process whose user owns no file here; without the right to become one, in a plain child."""
    in_child(run, NOBODY if os.getuid() == 0 else None)


def foreign(path: Path, mode: int) -> Path:
    """Set the permissions of a file so that they bind `as_another_user`; whoever is not root is bound as the owner."""
    path.chmod(mode if os.getuid() == 0 else (mode & 0o7) * 0o111)
    return path
