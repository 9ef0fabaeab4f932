"""`SpMM`: a layer that multiplies by one sparse matrix."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..close_names import with_article
from ..compiler import OperandError, ShapeError, UnsupportedError, outside_transforms
from ..formats import COO, GroupCOO
from ..formats.convert import block_grid
from ..formats.errors import FormatError
from ..formats.group_size import gpu_group_size, group_size
from ..formats.guard import ChangeGuards, may_keep
from ..formats.parts import parts_of
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import is_batched, is_compiling, is_dynamo, is_traced, is_wrapped, undifferentiated
from ..not_scripted import NotScripted
from .functional import SUM, Reduce, spmm
from .operands import as_format

__all__ = ["SpMM"]


OVERWRITTEN = (
    "AM and AK were overwritten with other coordinates than the layer was made with, as an average over buffers leaves "
    "them; give it others with load_state_dict, and average without them, as AveragedModel does with use_buffers=False"
)


class _Regrouped(NamedTuple):
    """A format in groups of another size, and guards of the tensors that it was made of."""

    form: SparseFormat
    guards: ChangeGuards
    grouped: SparseFormat


class SpMM(NotScripted, nn.Module):
    """C[m,n] += A[m,k] * B[k,n], with a sparse A that the layer holds.

    A is converted here, once. Coordinates (`AM`, `AK`) and values (`AV`) are copies: no gradient flows back to A, and
    training does not change it. `state_dict` holds all three.

    A change in place of `AV` counts at once. Other coordinates come by `load_state_dict`, or as tensors that are
    assigned to `AM` and `AK`: where the layer's own are overwritten with others, as by an average over buffers, it
    refuses to multiply and to be saved. What torch does not count goes unnoticed in both: a change through another
    tensor in the same memory that has a counter of its own, as in `AV.data.mul_(2)`, through numpy or DLPack, or by a
    kernel of one's own.

    Args:
        A: the sparse matrix [M, K], anything that `insum_ops.spmm` takes; a graph without a size has as many nodes as
            its edges name.
        trainable: whether the values, `AV`, are a parameter; otherwise they are a buffer.

    Raises:
        OperandError: A is nothing that holds a sparse matrix.
        ShapeError: A is no matrix.
        IndexRangeError: an edge names a node that is not there.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SpMM
        >>> layer = SpMM(torch.tensor([[0.0, 5.0], [6.0, 7.0]]).to_sparse())
        >>> layer
        SpMM(C[m,n] += A[m,k] * B[k,n], shape=[2, 2], nnz=3, GroupCOO)
        >>> layer(torch.tensor([[1.0], [10.0]]))
        tensor([[50.],
                [76.]])
        >>> layer.trainable, layer.A.to_dense().tolist()
        (False, [[0.0, 5.0], [6.0, 7.0]])
    """

    AM: Tensor | None
    AK: Tensor | None
    AV: Tensor

    def __init__(self, A: Any, trainable: bool = False) -> None:
        super().__init__()
        with torch.no_grad():
            form = as_format(A)
            if form is not A and type(form) is COO:  # as a CPU takes it; the layer may move to a GPU
                form = _grouped(form)
        if form.ndim != 2:
            raise ShapeError(f"A is {with_article(type(form).__name__)} of shape {list(form.shape)}; pass a matrix")
        # copies: an optimizer and load_state_dict change them in place, and A is not the layer's to change
        for name, coord in zip(("AM", "AK"), form.coords):
            self.register_buffer(name, None if coord is None else coord.clone())
        values = form.values.detach().clone()
        if trainable:
            self.AV = nn.Parameter(values)
        else:
            self.register_buffer("AV", values)
        self._form: SparseFormat = form
        self._gpu_size: int | None = None  # of groups, where the layer's own do not suit the GPU it has moved to
        self._last: _Regrouped | None = None
        self._rebuild()

    @property
    def A(self) -> SparseFormat:
        """The matrix [M, K] as a format over the layer's present values; made anew after `.to()` and the like.

        On a GPU groups have the size that suits it, whatever they have in the layer's own tensors.

        Raises:
            OperandError: the layer is on the meta device.
            FormatError: its coordinates were overwritten with others.
            UnsupportedError: torch.func.vmap batches its coordinates.
        """
        form, buffers = self._form, self._buffers
        AV = buffers.get("AV")
        if AV is None:
            AV = self.AV  # which takes a module ten times as long
        if not is_dynamo() and is_traced([AV]):  # torch.export and the like put their own tensors here
            return type(form)._traced((self.AM, self.AK), AV, form.shape, form.group_dim, form.block_size)
        rows, columns = form.coords
        is_current = _is_beneath(rows, buffers["AM"]) and _is_beneath(columns, buffers["AK"])
        if not is_current and not (is_compiling() and self._has_stand_ins()):
            form = self._rebuild() if may_keep(self.AM, self.AK) else self._rebuilt()
        if form.values is not AV:
            form = form.with_values(AV)
            if may_keep(*form.coords, AV) and _lasts(AV):
                self._form = form
        # a tracer can't lay out groups anew: how many there would be depends on the coordinates
        return form if self._gpu_size is None or is_compiling() else self._regrouped(form, self._gpu_size)

    @property
    def trainable(self) -> bool:
        """Whether the values are a parameter."""
        return isinstance(self.AV, nn.Parameter)

    def forward(self, B: Tensor, reduce: Reduce = "sum") -> Tensor:  # [..., K, N] -> [..., M, N]
        """Multiply the layer's matrix by a dense one.

        Args:
            B: dense matrix [K, N], a vector [K] or a batch [..., K, N].
            reduce: what becomes of a row's products: "sum", "mean", "max" or "min", as in `insum_ops.spmm`.

        Returns:
            C [M, N], [M] or [..., M, N].

        Raises:
            OperandError: B is no dense floating-point tensor on the layer's device, `reduce` none of those words, or
                the layer is on the meta device.
            ShapeError: B has another number of rows than A has columns.
            FormatError: the layer's coordinates were overwritten with others.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SpMM
            >>> layer = SpMM(torch.tensor([[0.0, 5.0], [6.0, 8.0]]).to_sparse())
            >>> layer(torch.tensor([1.0, 10.0]), reduce="mean")
            tensor([50., 43.])
        """
        size = self._gpu_size
        if size is None or not is_dynamo() or self.trainable or reduce == "mean":
            return spmm(self.A, B, reduce)
        parts = parts_of(self.A)  # put in groups that suit the GPU when the compiled call runs
        assert parts is not None
        return spmm(parts.in_groups_of(size), B, reduce)

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, B: Tensor, reduce: Reduce = "sum") -> Tensor: ...

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        form = self._form
        trained = ", trainable=True" if self.trainable else ""
        return f"{SUM[1]}, shape={list(form.shape)}, nnz={form.nnz}, {type(form).__name__}{trained}"

    def _has_stand_ins(self) -> bool:
        """Return whether torch.export has put tensors without numbers in the place of the layer's coordinates.

        The exported program then holds the coordinates themselves: which entries there are is known.
        """
        coords = [part for part in self._form.coords if part is not None]
        parts = [part for part in (self.AM, self.AK) if part is not None]
        return all(type(part) is not Tensor and part.device == own.device for part, own in zip(parts, coords))

    def _rebuilt(self) -> SparseFormat:
        """Return a format over the layer's present tensors; refuse coordinates that vmap batches."""
        form = self._form
        if any(part is not None and is_batched(part) for part in (self.AM, self.AK)):
            raise UnsupportedError(
                "AM and AK are batched by torch.func.vmap, but a pattern is one for all calls; "
                "pass values alone, as in torch.func.functional_call(layer, {'AV': values}, (B,))"
            )
        values = self.AV
        if values.is_meta:
            raise OperandError(
                "the layer is on the meta device, where its matrix has no entries; give it memory with "
                ".to_empty(device=...) and load a state_dict"
            )
        if not _lasts(values):
            with outside_transforms():
                values = torch.zeros((), dtype=values.dtype, device=values.device).expand(values.shape)
        return type(form)((self.AM, self.AK), values, form.shape, form.group_dim, form.block_size)

    def _rebuild(self) -> SparseFormat:
        """Replace the layer's format by `_rebuilt`; from now on its coordinates may not be overwritten."""
        self._form = form = self._rebuilt()
        if may_keep(*form.coords):
            form._pattern_cache.fix(OVERWRITTEN)
        self._gpu_size = _other_size(form)
        return form

    def _regrouped(self, form: SparseFormat, size: int) -> SparseFormat:
        """Return `form` in groups of another size; a matrix that does not change is regrouped once."""
        values = form.values
        if not may_keep(values) or values.requires_grad or values.is_inference():
            return form.regroup(form.group_dim, size)
        last = self._last
        if last is not None and last.form is form and last.guards.hold():
            return last.grouped
        guards = ChangeGuards([*form.coords, values])  # before they are read: another thread may write to them
        grouped = form.regroup(form.group_dim, size)
        self._last = _Regrouped(form, guards, grouped)
        return grouped

    def _check_coordinates(self) -> bool:
        """Return whether the format is over the layer's buffers; raise if those were overwritten."""
        parts = [part for part in self._form.coords if part is not None]
        buffers = [part for part in (self.AM, self.AK) if part is not None]
        is_current = len(parts) == len(buffers) and all(map(is_, parts, buffers))
        if not is_current or is_compiling() or any(type(part) is not Tensor or part.is_meta for part in buffers):
            return False
        _ = self._form.pattern_cache
        return True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Check coordinates before they move to another device: afterwards a change could not be detected."""
        is_known, before = self._check_coordinates(), self._form.coords
        super()._apply(fn, recurse)
        after = (self.AM, self.AK)
        if is_known and not all(map(is_, before, after)) and all(map(_are_equal, before, after)):
            self._rebuild()
        return self

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Save the tensors; refuse coordinates that were overwritten, which could not be detected after loading."""
        self._check_coordinates()
        super()._save_to_state_dict(*arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, without the regrouped format, which is guarded by addresses."""
        return {**super().__getstate__(), "_last": None}

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Load a matrix as a whole, or report why it does not fit; a pattern that stays the same is not rebuilt."""
        form, pattern_cache = self._form, self._form._pattern_cache
        tensors = {name: getattr(self, name) for name in ("AM", "AK", "AV") if getattr(self, name) is not None}
        problem = _mismatch(state_dict, prefix, form, tensors)
        if problem:  # nothing is copied: coordinates and values of two matrices would be mixed
            lists[2].append(problem)
            return
        if pattern_cache.guard.hold():
            pattern_cache.guard.keep_values()
        # this copies coordinates into the same tensors
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        is_current = form.coords[0] is self.AM and form.coords[1] is self.AK
        guard = pattern_cache.guard.renewed() if is_current else None
        if self.AV.is_meta:
            return  # a state on the meta device was assigned: a call refuses it
        if guard is None:
            self._rebuild()
        else:  # the pattern is what it was: the next call may be a compiled one
            pattern_cache.guard = guard


def _grouped(form: COO) -> GroupCOO:
    """Return a matrix in groups of the size that `group_size` chooses, each entry in a slot of its own."""
    counts = form.AM.new_zeros(form.shape[0]).index_add_(0, form.AM, torch.ones_like(form.AM))
    pattern = form._pattern_along(0, group_size(counts))
    return GroupCOO(pattern.coords, pattern.gather(form.values), form.shape)


def _are_equal(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    is_read = type(after) is Tensor and not after.is_meta
    return is_read and before.shape == after.shape and torch.equal(before.to(after.device), after)


def _lasts(values: Tensor) -> bool:
    """Whether values outlive the call: those that torch.func passes do not, and would keep its graph alive."""
    return values.is_leaf and not is_wrapped(values)


def _mismatch(state_dict: Mapping[str, Any], prefix: str, form: SparseFormat, tensors: Mapping[str, Tensor]) -> str:
    """Return why the entries under `prefix` can't be copied into a layer's tensors, or "" if they can."""
    loaded = {name: state_dict[f"{prefix}{name}"] for name in tensors if f"{prefix}{name}" in state_dict}
    if not loaded:
        return ""  # strict loading says what is missing
    for name, part in tensors.items():
        key = f"{prefix}{name}"
        if name not in loaded:
            others = " and ".join(f"{prefix}{other}" for other in loaded)
            verb = "are" if len(loaded) > 1 else "is"
            return f"{key} is not in the state_dict but {others} {verb}; a matrix is loaded whole, or not at all"
        value = loaded[name]
        if not isinstance(value, Tensor):
            return f"{key} in the state_dict is of type {type(value).__name__}; it was not saved by an SpMM"
        if value.shape != part.shape:
            return (
                f"{key} is {list(value.shape)} in the state_dict but {list(part.shape)} here; "
                "it was saved with a matrix of other entries"
            )
    if any(part.is_meta for part in loaded.values()):
        return ""
    grid, place = block_grid(form.shape, form.block_size), loaded["AV"].device
    coords = tuple(loaded[name].to(place) if name in loaded else None for name in ("AM", "AK"))
    for name, coord, size in zip(("AM", "AK"), coords, grid):
        if coord is not None and coord.numel() and int(coord.max()) >= size:
            blocks = "" if form.block_size is None else f", {list(grid)} blocks"
            return (
                f"{prefix}{name} in the state_dict names {int(coord.max())} but the matrix here is "
                f"{list(form.shape)}{blocks}; it was saved with a matrix of another shape"
            )
    nothing = torch.zeros((), dtype=form.dtype, device=place).expand(form.values.shape)
    try:
        type(form)(coords, nothing, form.shape, form.group_dim, form.block_size)
    except FormatError as error:
        return f"{prefix}AM and {prefix}AK in the state_dict make no {type(form).__name__} {list(form.shape)}: {error}"
    return ""


def _other_size(form: SparseFormat) -> int | None:
    """Return the group size that suits a matrix on its GPU; None if it has that size or is on no GPU."""
    if form.device.type != "cuda" or type(form) is not GroupCOO or form.group_dim != 0 or form.num_groups == 0:
        return None  # a matrix grouped by columns is regrouped for its products anyway
    counts = (form.AK >= 0).sum(1)
    size = gpu_group_size(counts.new_zeros(form.shape[0]).index_add_(0, form.AM.long(), counts))
    return None if size == form.group_size else size


def _is_beneath(own: Tensor | None, buffer: Tensor | None) -> bool:
    """Return whether a buffer is a format's own tensor, or what grad, vjp and jvp have wrapped around it."""
    if own is buffer or own is None or buffer is None or is_compiling():
        return own is buffer
    return own is undifferentiated(buffer)
