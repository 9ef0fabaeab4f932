"""A plan with some of its tensors in place already: what comes anew with a call is put beside them and it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .bind import row_major
from .errors import UnsupportedError
from .express import Lane, express
from .launch import Launcher
from .pipeline import Plan
from .ranges import known_version, remembered_range
from .sparse import Recipe, SparseFormat, is_sparse

__all__ = ["Backward", "Final", "PlainCall", "SparseCall", "Standing", "ValuesGradient", "contiguous"]

Final = tuple[tuple[int, ...], tuple[int, ...]]  # an output's shape and strides
Moving = tuple[tuple[int, str, Any, "tuple[int, ...] | None"], ...]  # (place, the user's name, splits, shape if a view)
Index = tuple[Tensor, int, int]  # an index tensor, its version and its place in memory
Padded = tuple[bool, ...]  # which of a plan's index tensors hold a -1


class Read(NamedTuple):
    """The index tensors of a plan whose tensors all stay, as they were when it was read which of them are padded."""

    indices: tuple[Index, ...]
    padded: Padded


def contiguous(size: tuple[int, ...]) -> Final:
    return size, row_major(size)


class _Ready:
    """A plan, and the tensors that stay, in its order; None stands where one comes anew."""

    is_compared = False  # the tensors that stay, by whoever finds the call: they are a format's own coordinates

    def __init__(self, plan: Plan, fixed: list[Tensor | None], facts: list[Tensor]) -> None:
        self.plan, self.fixed, self.facts = plan, fixed, facts
        self.is_sum, self.is_half, self.runners = plan.is_sum, plan.is_half, plan.runners
        self.reads_none = all([fixed[number] is not None for number, _ in plan.pointed])  # index tensors of a call
        # Several threads call one of these at once, so that nothing of a single call is kept on it. Each of the two is
        # whole before it is assigned, and tells by itself for which tensors it holds.
        self.read: Read | None = None
        self.express: Lane | None = None  # once a call has found its kernel

    def padded(self, tensors: list[Any]) -> Padded:
        """`plan.padded`, by version counters and addresses alone where every index tensor stays."""
        known = self.read
        if known is not None:
            for index, version, pointer in known.indices:
                if index._version != version or index.data_ptr() != pointer:
                    break
            else:
                return known.padded
        padded = self.plan.padded(tensors)
        if self.reads_none:
            indices = self.indices(padded)
            self.read = None if indices is None else Read(tuple(indices), padded)
        return padded

    def indices(self, padded: Padded) -> list[Index] | None:
        """The index tensors that stay, in the versions that are so padded; None: one of them hides its changes.

        Another thread may have written to one since it was read: it is asked again, which takes no time.
        """
        found = list[Index]()
        for (number, extent), is_padded in zip(self.plan.pointed, padded):
            index = self.fixed[number]
            if index is None:
                continue
            version, pointer = known_version(index), index.data_ptr()
            if version is None:
                return None
            low, high = remembered_range(index)
            if high >= extent or (low < 0) is not is_padded:
                return None
            found.append((index, version, pointer))
        return found

    def variant(self, padded: Padded) -> object:
        """`plan.variant` of tensors that are so padded."""
        return self.plan.with_rounding(padded) if self.is_half else padded

    def express_to(
        self, launcher: Launcher, padded: Padded, comes: Sequence[Sequence[int]], final: Final
    ) -> Lane | None:
        """To the kernel that has just run; None: it takes more than a launch, or an index tensor hides its changes."""
        if not launcher.is_plain:
            return None
        indices = self.indices(padded)
        if indices is None:
            return None
        compared = None if self.is_compared else [(index, version) for index, version, _ in indices]
        return express(self.plan, launcher, padded, [*self.fixed, *self.facts], comes, compared, final)


class PlainCall(_Ready):
    """A statement over plain tensors, ready for those of its tensors that do not stay."""

    def __init__(self, plan: Plan, fixed: list[Tensor | None], facts: list[Tensor]) -> None:
        super().__init__(plan, fixed, facts)
        self.places = [at for at, tensor in enumerate(fixed) if tensor is None]
        self.lanes: dict[tuple[bool, ...], Lane | None] = {}  # by which index tensors are padded: those may take turns
        self.placed: tuple[Launcher, tuple[int, ...], Launcher | None] | None = None  # for which strides of the output

    def __call__(self, moving: Sequence[Tensor]) -> Tensor:
        lane = self.express
        result = None if lane is None else lane(moving)
        return self.anew(moving) if result is None else result

    def anew(self, moving: Sequence[Tensor]) -> Tensor:
        """The same where the express lane has been tried."""
        tensors, runner, padded = self.prepared(moving)
        lane = self.lanes.get(padded)
        result = None if lane is None or lane is self.express else lane(moving)
        if result is not None:
            self.express = lane
            return result
        output = runner(tensors, self.facts)
        if type(runner) is Launcher:
            lane = self.express_to(runner, padded, [(at,) for at in self.places], (runner.size, runner.strides))
            self.express = self.lanes[padded] = lane
        return output  # type: ignore[no-any-return]

    def prepared(self, moving: Iterable[Tensor]) -> tuple[list[Any], Any, Padded]:
        """All tensors in their places, what runs on them, and which index tensors among them are padded."""
        tensors: list[Any] = self.fixed.copy()
        for at, tensor in zip(self.places, moving):
            tensors[at] = tensor
        padded = self.padded(tensors)
        key = self.variant(padded)
        runner: Any = self.runners.get(key)
        if runner is None:
            runner = self.plan.new_runner(key, tensors, self.facts)
        return tensors, runner, padded

    def add_to(self, total: Tensor, moving: Iterable[Tensor]) -> Tensor:
        """The same for a statement that starts from the last of its moving tensors, which is the caller's to lose.

        A kernel that adds atomically adds to it where it is; any other gives a new tensor.
        """
        tensors, runner, _ = self.prepared((*moving, total))
        if type(runner) is Launcher and runner.adds_in_place and total.stride() == runner.strides:
            runner.launch((*tensors, *self.facts, total))
            return total
        return runner(tensors, self.facts)  # type: ignore[no-any-return]

    def write_to(self, place: Tensor, moving: Iterable[Tensor]) -> Tensor:
        """The result in a place of the caller's, which may be a part of a larger tensor, of less than 2**31 bytes.

        A kernel that writes all of its output writes it there; what another one makes is copied.
        """
        tensors, runner, _ = self.prepared(moving)
        launcher = None
        if type(runner) is Launcher and runner.is_alone and not runner.is_wide:
            strides, known = place.stride(), self.placed
            if known is None or known[0] is not runner or known[1] != strides:
                known = self.placed = runner, strides, runner.placed(strides)
            launcher = known[2]
        if launcher is not None:
            try:
                launcher.launch((*tensors, *self.facts, place))
                return place
            except UnsupportedError:  # for an output that lies like this it can't be built
                self.placed = runner, place.stride(), None
        return place.copy_(runner(tensors, self.facts))


class _Viewed(_Ready):
    """A statement whose moving tensors are the user's, split into blocks where it reads them so."""

    def __init__(
        self,
        plan: Plan,
        how: Recipe,
        tensors: Mapping[str, Tensor],
        operands: Mapping[str, Any],
        facts: list[Tensor],
        final: Final | None,
    ) -> None:
        fixed, moving = _sorted_out(how, tensors, operands)
        super().__init__(plan, fixed, facts)
        self.how, self.moving, self.final = how, moving, final
        self.names = tuple(operands)  # in the caller's order, which is the express lane's
        self.places = [(at, name) for at, name, _, _ in moving]
        self.is_direct = final is not None and all(shape is not None or not splits for _, _, splits, shape in moving)

    def run(self, tensors: list[Any], operands: Mapping[str, Any]) -> Tensor:
        """Give each moving tensor its place and run, without making views where a kernel would not notice."""
        final = self.final
        if final is not None:
            launched = self.launch(tensors, operands, final)
            if launched is not None:
                result, self.express = launched
                return result
        for at, name in self.places:
            tensors[at] = operands[name]
        for at, _, splits, shape in self.moving:
            if shape is not None:
                tensors[at] = tensors[at].view(shape)
            elif splits:
                tensors[at] = self.how.split(tensors[at], splits)
        output: Any = self.plan(tensors, self.facts)  # a plan without winners returns one tensor
        return output if final is None else output.view(final[0])  # type: ignore[no-any-return]

    def launch(
        self, tensors: list[Any], operands: Mapping[str, Any], final: Final
    ) -> tuple[Tensor, Lane | None] | None:
        """The result in any shape of its length, and the way to it from now on; None: no kernel alone does it.

        A kernel sees memory, not shapes, so a tensor stands for its views here.
        """
        if not self.is_direct:
            return None
        for at, name in self.places:
            tensors[at] = operands[name]
        padded = self.padded(tensors)
        launcher: Any = self.runners.get(self.variant(padded))
        if type(launcher) is not Launcher or not launcher.is_plain:
            return None
        output = launcher.into(*final, tensors, self.facts)
        if output is None:
            return None
        return output, self.express_to(launcher, padded, [self.taken(name) for name in self.names], final)

    def taken(self, name: str) -> list[int]:
        """The places that an operand takes among the plan's tensors."""
        return [at for at, own in self.places if own == name]


class SparseCall(_Viewed):
    """A format-agnostic statement over one pattern, ready for values and dense tensors."""

    def __init__(
        self,
        plan: Plan,
        how: Recipe,
        group_dim: int,
        tensors: Mapping[str, Tensor],
        operands: Mapping[str, Any],
        facts: list[Tensor],
    ) -> None:
        is_whole = math.prod(how.size) == math.prod(how.final)  # else blocks are to be cropped
        super().__init__(plan, how, tensors, operands, facts, contiguous(how.final) if is_whole else None)
        self.group_dim, self.values_at = group_dim, list(tensors).index(how.values)
        self.fixed[self.values_at] = None
        values, own = tensors[how.values], _values_of(operands)
        self.reads_through = bool(how.source) and values.data_ptr() == own.data_ptr() and own.is_contiguous()
        self.name = next(name for name, operand in operands.items() if is_sparse(operand))
        self.is_compared = operands[self.name].group_dim == group_dim
        self.takes_values = self.reads_through or self.is_compared  # as they are
        # the coordinates of other groups, which whoever has regrouped the format may change
        others = [] if self.is_compared else self.fixed
        counted = [index for index in others if index is not None and not index.is_inference()]
        self.regrouped = [(index, index._version, index.data_ptr()) for index in counted]
        if self.reads_through:  # the values are a view too
            self.moving = (*self.moving, (self.values_at, how.values, (), tuple(values.shape)))

    def __call__(self, form: SparseFormat, tensors: Sequence[Tensor]) -> Tensor | None:
        """`tensors` are those of the operands in the caller's order, the format's values among them.

        None: coordinates have changed, and so have the facts about them.
        """
        lane = self.express
        result = None if lane is None else lane(tensors)
        return self.anew(form, tensors) if result is None else result

    def anew(self, form: SparseFormat, tensors: Sequence[Tensor]) -> Tensor | None:
        """The same where the express lane has been tried."""
        for index, version, pointer in self.regrouped:
            if index._version != version or index.data_ptr() != pointer:
                return None
        output = self.run(self.beside(form), dict(zip(self.names, tensors)))
        return output if self.final is not None else self.how.finish(output)

    def beside(self, form: SparseFormat) -> list[Any]:
        """The tensors that stay, and the format's values."""
        tensors: list[Any] = self.fixed.copy()
        if self.takes_values:
            tensors[self.values_at] = form.values
        else:
            tensors[self.values_at] = form.flat_values if self.how.source else form.regroup(self.group_dim).values
        return tensors

    def express_to(
        self, launcher: Launcher, padded: Padded, comes: Sequence[Sequence[int]], final: Final
    ) -> Lane | None:
        return super().express_to(launcher, padded, comes, final) if self.takes_values else None

    def taken(self, name: str) -> list[int]:
        return [self.values_at] if name == self.name else super().taken(name)


class Standing:
    """A call to which tensors stand for views of them, as a vector for the matrix that it is expanded to."""

    def __init__(self, call: SparseCall, final: Final) -> None:
        self.call, self.final = call, final
        self.express: Lane | None = None

    def __call__(self, form: SparseFormat, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result in its own shape; None: no kernel alone does it."""
        lane = self.express
        result = None if lane is None else lane(tensors)
        if result is not None:
            return result
        launched = self.call.launch(self.call.beside(form), dict(zip(self.call.names, tensors)), self.final)
        if launched is None:
            return None
        output, self.express = launched
        return output


class ValuesGradient(_Viewed):
    """The gradient of a format's values in one statement, ready for dense tensors and the upstream gradient."""

    is_compared = True

    def __init__(
        self,
        plan: Plan,
        how: Recipe,
        upstream: str,
        tensors: Mapping[str, Tensor],
        operands: Mapping[str, Any],
        size: tuple[int, ...],
    ) -> None:
        views = (*how.views, (upstream, upstream, how.output_splits))
        super().__init__(plan, replace(how, views=views), tensors, operands, [], contiguous(size))
        self.upstream = upstream  # its name among the operands

    def __call__(self, operands: Mapping[str, Tensor]) -> Tensor:
        lane = self.express
        result = None if lane is None else lane([operands[name] for name in self.names])
        if result is not None:
            return result
        return self.run(self.fixed.copy(), operands)


class Backward:
    """All gradients of a statement with a format in it: of its values, then of each dense tensor."""

    def __init__(
        self, values: ValuesGradient | None, dense: Sequence[tuple[SparseCall | None, str] | None], dtypes: Any
    ) -> None:
        self.values, self.dense, self.dtypes = values, dense, dtypes

    def __call__(
        self, form: SparseFormat, operands: Mapping[str, Tensor], upstream: Tensor
    ) -> list[Tensor | None] | None:
        """None: coordinates have changed."""
        grads: list[Tensor | None] = [None]
        if self.values is not None:
            grads[0] = self.values({**operands, self.values.upstream: upstream})
        for made in self.dense:
            if made is None:
                grads.append(None)
                continue
            call, upstream_as = made
            # without a call it is the tensor that sums start from
            if call is None:
                grads.append(upstream)
                continue
            given = {**operands, call.name: form.values, upstream_as: upstream}
            grad = call(form, [given[name] for name in call.names])
            if grad is None:
                return None
            grads.append(grad)
        for at, dtype in enumerate(self.dtypes):
            grad = grads[at]
            if grad is not None and grad.dtype is not dtype:
                grads[at] = grad.to(dtype)
        return grads


def _values_of(operands: Mapping[str, Any]) -> Tensor:
    """The values of the format among them."""
    return next(operand.values for operand in operands.values() if is_sparse(operand))


def _sorted_out(
    how: Recipe, tensors: Mapping[str, Tensor], operands: Mapping[str, Any]
) -> tuple[list[Tensor | None], Moving]:
    """A statement's tensors: those that belong to the pattern, and those that come anew with each call."""
    views = {name: (original, splits) for name, original, splits in how.views}
    fixed: list[Tensor | None] = []
    moving = []
    for at, (name, tensor) in enumerate(tensors.items()):
        fixed.append(None if name in views else tensor)
        if name in views:
            original, splits = views[name]
            given = operands[original]
            is_view = tensor.data_ptr() == given.data_ptr() and tensor.numel() == given.numel()
            moving.append((at, original, splits, tuple(tensor.shape) if splits and is_view else None))
    return fixed, tuple(moving)
