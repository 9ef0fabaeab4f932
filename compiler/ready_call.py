"""A plan with some of its tensors in place already: what comes anew with a call is put beside them and it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .bind import row_major
from .launch import Launcher
from .pipeline import Plan
from .ranges import known_version
from .sparse import Recipe, SparseFormat, is_sparse

__all__ = ["Backward", "Final", "PlainCall", "SparseCall", "ValuesGradient", "contiguous"]

Final = tuple[tuple[int, ...], tuple[int, ...]]  # an output's shape and strides
Moving = tuple[tuple[int, str, Any, "tuple[int, ...] | None"], ...]  # (place, the user's name, splits, shape if a view)


def contiguous(size: tuple[int, ...]) -> Final:
    return size, row_major(size)


class _Ready:
    """A plan, and the tensors that stay, in its order; None stands where one comes anew."""

    def __init__(self, plan: Plan, fixed: list[Tensor | None], facts: list[Tensor]) -> None:
        self.plan, self.fixed, self.facts = plan, fixed, facts
        self.is_sum, self.is_half, self.runners = plan.is_sum, plan.is_half, plan.runners
        self.read: list[tuple[Tensor, int]] | None = None  # index tensors that stay, in the version that `padded` is of
        self.padded: tuple[bool, ...] = ()

    def variant(self, tensors: list[Any]) -> object:
        """`plan.variant`, by version counters alone where every index tensor stays."""
        if self.read is not None:
            for index, version in self.read:
                if index._version != version:
                    break
            else:
                return self.plan.with_rounding(self.padded) if self.is_half else self.padded
        self.padded = self.plan.padded(tensors)
        indices = [self.fixed[number] for number, _ in self.plan.pointed]
        versions = [None if index is None else known_version(index) for index in indices]
        self.read = None if None in versions else list(zip(indices, versions))  # type: ignore[arg-type]
        return self.plan.with_rounding(self.padded) if self.is_half else self.padded

    def launcher(self, tensors: list[Any]) -> Launcher | None:
        """The kernel that runs on tensors like these, if it is known and writes all of its output by itself.

        A kernel sees memory, not shapes, so a tensor stands for its views here.
        """
        runner: Any = self.runners.get(self.variant(tensors))
        return runner if type(runner) is Launcher and runner.is_alone else None


class PlainCall(_Ready):
    """A statement over plain tensors, ready for those of its tensors that do not stay."""

    def __init__(self, plan: Plan, fixed: list[Tensor | None], facts: list[Tensor]) -> None:
        super().__init__(plan, fixed, facts)
        self.places = [at for at, tensor in enumerate(fixed) if tensor is None]
        self.placed: tuple[Launcher, tuple[int, ...], Launcher | None] | None = None  # for which strides of the output

    def __call__(self, moving: Iterable[Tensor]) -> Tensor:
        tensors, runner = self.prepared(moving)
        return runner(tensors, self.facts)  # type: ignore[no-any-return]

    def prepared(self, moving: Iterable[Tensor]) -> tuple[list[Any], Any]:
        """All tensors in their places, and what runs on them."""
        tensors: list[Any] = self.fixed.copy()
        for at, tensor in zip(self.places, moving):
            tensors[at] = tensor
        key = self.variant(tensors)
        runner = self.runners.get(key)
        if runner is None:
            runner = self.runners[key] = self.plan.runner(key, tensors, self.facts)
        return tensors, runner

    def add_to(self, total: Tensor, moving: Iterable[Tensor]) -> Tensor:
        """The same for a statement that starts from the last of its moving tensors, which is the caller's to lose.

        A kernel that adds atomically adds to it where it is; any other gives a new tensor.
        """
        tensors, runner = self.prepared((*moving, total))
        if type(runner) is Launcher and runner.adds_in_place and total.stride() == runner.strides:
            runner.launch((*tensors, *self.facts, total))
            return total
        return runner(tensors, self.facts)  # type: ignore[no-any-return]

    def write_to(self, place: Tensor, moving: Iterable[Tensor]) -> Tensor:
        """The result in a place of the caller's, which may be a part of a larger tensor, of less than 2**31 bytes.

        A kernel that writes all of its output writes it there; what another one makes is copied.
        """
        tensors, runner = self.prepared(moving)
        launcher = None
        if type(runner) is Launcher and runner.is_alone and not runner.is_wide:
            strides, known = place.stride(), self.placed
            if known is None or known[0] is not runner or known[1] != strides:
                known = self.placed = runner, strides, runner.placed(strides)
            launcher = known[2]
        if launcher is None:
            return place.copy_(runner(tensors, self.facts))
        launcher.launch((*tensors, *self.facts, place))
        return place


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
        self.places = [(at, name) for at, name, _, _ in moving]
        self.is_direct = final is not None and all(shape is not None or not splits for _, _, splits, shape in moving)

    def run(self, tensors: list[Any], operands: Mapping[str, Any], final: Final | None) -> Tensor:
        """Give each moving tensor its place and run, without making views where a kernel would not notice."""
        for at, name in self.places:
            tensors[at] = operands[name]
        if self.is_direct and final is not None:
            launcher = self.launcher(tensors)
            if launcher is not None:
                return launcher.into(*final, tensors, self.facts)
        for at, _, splits, shape in self.moving:
            if shape is not None:
                tensors[at] = tensors[at].view(shape)
            elif splits:
                tensors[at] = self.how.split(tensors[at], splits)
        output: Any = self.plan(tensors, self.facts)  # a plan without winners returns one tensor
        return output if final is None else output.view(final[0])  # type: ignore[no-any-return]


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
        if self.reads_through:  # the values are a view too
            self.moving = (*self.moving, (self.values_at, how.values, (), tuple(values.shape)))

    def __call__(self, form: SparseFormat, operands: Mapping[str, Any]) -> Tensor:
        output = self.run(self.beside(form), operands, self.final)
        return output if self.final is not None else self.how.finish(output)

    def standing(self, form: SparseFormat, operands: Mapping[str, Any], final: Final) -> Tensor | None:
        """The result in another shape, where `operands` stand for views of them; None: no kernel alone does it."""
        tensors = self.beside(form)
        for at, name in self.places:
            tensors[at] = operands[name]
        launcher = self.launcher(tensors)
        return None if launcher is None else launcher.into(*final, tensors, self.facts)

    def beside(self, form: SparseFormat) -> list[Any]:
        """The tensors that stay, and the format's values."""
        tensors: list[Any] = self.fixed.copy()
        if self.reads_through or form.group_dim == self.group_dim:
            tensors[self.values_at] = form.values
        else:
            tensors[self.values_at] = form.flat_values if self.how.source else form.regroup(self.group_dim).values
        return tensors


class ValuesGradient(_Viewed):
    """The gradient of a format's values in one statement, ready for dense tensors and the upstream gradient."""

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
        return self.run(self.fixed.copy(), operands, self.final)


class Backward:
    """All gradients of a statement with a format in it: of its values, then of each dense tensor."""

    def __init__(
        self, values: ValuesGradient | None, dense: Sequence[tuple[SparseCall | None, str] | None], dtypes: Any
    ) -> None:
        self.values, self.dense, self.dtypes = values, dense, dtypes

    def __call__(self, form: SparseFormat, operands: Mapping[str, Tensor], upstream: Tensor) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None]
        if self.values is not None:
            grads[0] = self.values({**operands, self.values.upstream: upstream})
        for made in self.dense:
            if made is None:
                grads.append(None)
                continue
            call, upstream_as = made
            # without a call it is the tensor that sums start from
            grads.append(upstream if call is None else call(form, {**operands, upstream_as: upstream}))
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
