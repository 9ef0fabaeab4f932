"""A problem to the launcher that runs it best: the space of candidates, their times, the cache on disk.

A file imports only from those above it.

    settings      whether calls may be timed, and how many ways to run them are
    tuning_cache  tuned configs, kept in memory and on disk, one JSON file per key
    exemplars     statements by whose kernels a version of the code generator is known
    footprint     what a config would occupy of a multiprocessor, estimated from its schedule
    stretches     tiles of long sums that read stretches of memory, by the bytes in flight
    cost          how long a candidate takes, about, and the statement at least, by the device model
    traits        what a schedule is like, as far as its tiles go
    measured      what was fastest where it was measured, as points of the space of configs
    space         every config that a schedule may have, and those worth timing
    problem       all that decides which kernel runs a statement best, and the ways there are to run it
    search        which candidates are built, and when it is enough
    tuning_file   all tuned configs as one file for another machine, and such a file read
    captured      a graph of several calls, for timing; torch is as it was where that fails
    clock         how long one call takes
    choice        which of several calls with one result is the fastest
    autotune      which strategy, schedule and config runs a statement fastest
    joint         the same of several statements in one kernel
"""

from .autotune import Timing, cached_launcher, choose, host_milliseconds, recall, refusals, tune
from .choice import fastest, is_put_off
from .cost import NEAR, floor_milliseconds
from .joint import JointProblem, SummedProblem, joint_problem, summed_problem
from .problem import (
    Candidate,
    Problem,
    bucketed_lengths,
    candidates,
    choice_key,
    device_name,
    digest,
    generator_version,
    is_uneven,
)
from .search import FIRST, Search, next_batch
from .settings import may_be_timed, tuning_mode
from .tuning_cache import Key
from .tuning_file import Tuned, clear_cache, export_tuned, import_tuned, tuned

__all__ = [
    "FIRST",
    "NEAR",
    "Candidate",
    "JointProblem",
    "Key",
    "Problem",
    "Search",
    "SummedProblem",
    "Timing",
    "Tuned",
    "bucketed_lengths",
    "cached_launcher",
    "candidates",
    "choice_key",
    "choose",
    "clear_cache",
    "device_name",
    "digest",
    "export_tuned",
    "fastest",
    "floor_milliseconds",
    "generator_version",
    "host_milliseconds",
    "import_tuned",
    "is_put_off",
    "is_uneven",
    "joint_problem",
    "may_be_timed",
    "next_batch",
    "recall",
    "refusals",
    "summed_problem",
    "tune",
    "tuned",
    "tuning_mode",
]
