"""A kernel on its stream: what Triton's launcher would hand to its C function arrives there, without the launcher."""

from __future__ import annotations

import pytest

from insum_ops.compiler.runtime.enqueue import enqueue

ARGUMENTS = [4096, 8192, 7, 1]
METADATA = (4, 1, 1024)
HOOKS = (None, None, None)  # what they are told, the one before, the one after
STREAMS = {0: 100, 1: 101}


class Launcher36:
    """Triton 3.6: the arguments follow all else, one by one."""

    def __init__(self, scratch=(0, 0)):
        self.global_scratch_size, self.profile_scratch_size = scratch
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.reached, self.is_asked = [], False

    def launch(self, *given):
        self.reached.append(given)

    def memory(self):
        return tuple(size or None for size in (self.global_scratch_size, self.profile_scratch_size))

    def __call__(self, x, y, z, stream, function, *given):
        self.is_asked = True
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, *self.memory(), *given)


class Launcher37(Launcher36):
    """Triton 3.7: the arguments are one sequence, which is described beside it."""

    arg_annotations, kernel_signature = ("a", "b", "c", "d"), b"ppii"

    def __call__(self, x, y, z, stream, function, metadata, told, before, after, *given):
        self.is_asked = True
        kinds = self.launch_cooperative_grid, self.launch_pdl
        described = self.arg_annotations, self.kernel_signature
        self.launch(x, y, z, stream, function, *kinds, metadata, told, before, after, *self.memory(), *described, given)


class Compiled:
    function, packed_metadata = 77, METADATA

    def __init__(self, run):
        self.run = run


VERSIONS = {"3.6.0": Launcher36, "3.7.1": Launcher37}
every_version = pytest.mark.parametrize("version", VERSIONS)


def launcher(version, name="CudaLauncher", scratch=(0, 0)):
    return type(name, (VERSIONS[version],), {})(scratch)


def reached(run, version, device=1):
    """What arrives at the C function, the arguments as a tuple where they are one of its arguments."""
    enqueue(Compiled(run), device, STREAMS.get, version)(5, ARGUMENTS)
    (given,) = run.reached
    return tuple(tuple(one) if isinstance(one, list) else one for one in given)


def by_triton(run):
    run(5, 1, 1, 101, 77, METADATA, *HOOKS, *ARGUMENTS)
    (given,) = run.reached
    return given


@every_version
def test_the_c_function_gets_what_triton_would_give_it(version):
    run = launcher(version)
    assert reached(run, version) == by_triton(launcher(version))
    assert not run.is_asked


@every_version
@pytest.mark.parametrize("scratch", [(64, 0), (0, 64), (64, 64)])
def test_a_kernel_that_asks_for_memory_goes_through_triton(version, scratch):
    run = launcher(version, scratch=scratch)
    assert reached(run, version) == by_triton(launcher(version, scratch=scratch))
    assert run.is_asked


@pytest.mark.parametrize("other", ["3.5.1", "3.8.0", "4.0.0", "3.70.0", "none", "3.7.1+git.1"])
def test_a_version_that_is_not_known_goes_through_triton(other):
    run = launcher("3.7.1")
    assert reached(run, other) == by_triton(launcher("3.7.1"))
    assert run.is_asked


@every_version
def test_another_kind_of_launcher_is_called_as_it_is(version):
    run = launcher(version, name="HIPLauncher")
    assert reached(run, version) == by_triton(launcher(version))
    assert run.is_asked


@every_version
def test_the_stream_is_asked_for_at_each_call(version):
    run, streams = launcher(version), {1: 3}
    launch = enqueue(Compiled(run), 1, streams.get, version)
    launch(5, ARGUMENTS)
    streams[1] = 4
    launch(6, ARGUMENTS)
    assert [(given[0], given[3]) for given in run.reached] == [(5, 3), (6, 4)]


@every_version
def test_what_is_loaded_lives_as_long_as_what_launches_it(version):
    compiled = Compiled(launcher(version))
    assert enqueue(compiled, 0, STREAMS.get, version).compiled is compiled
