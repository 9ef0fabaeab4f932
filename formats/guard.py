"""Whether a tensor has changed, and whether something may be kept: the one module that reads versions and addresses.

    ChangeGuard         one tensor, which it does not hold: the caller brings the tensor
    KeptGuard           the same as an attribute of the tensor, with what is known of it until it changes
    TensorsGuard        several tensors, which it does not hold: the caller brings those that may be them
    ChangeGuards        several tensors, which it holds; those made in inference mode are compared with a copy
    SparseChangeGuard   one torch sparse tensor, which it does not hold
    change_expression   what a launch plan asks about a pinned tensor, as text
    guard_expression    what a launch plan asks about an input that has a ChangeGuard, as text
    may_keep, is_real   whether something may outlive the call that works it out

torch counts changes in place by the version of a tensor. `x.data = ...` counts none, but moves the tensor to other
memory or gives it another layout. So a tensor has not changed if version, address and layout are what they were.
Memory whose address is compared is held, so that no other tensor can have that address. What goes unnoticed is a
change that torch does not count: through another tensor in the same memory that has a counter of its own, as in
`x.data.mul_(2)`, through numpy or DLPack, or by a kernel of one's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .torch_state import PLAIN, is_capturing, is_compiling, is_functional, is_wrapped, modes

__all__ = [
    "ChangeGuard",
    "ChangeGuards",
    "KeptGuard",
    "SparseChangeGuard",
    "TensorsGuard",
    "Unsaved",
    "address_expression",
    "address_of",
    "change_expression",
    "guard_expression",
    "is_freed",
    "is_real",
    "may_keep",
    "offset_in_memory",
    "versions_of",
]


def is_freed(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor was given back though it has elements, as sharding parameters does.

    >>> tensor = torch.ones(2)
    >>> _ = tensor.untyped_storage().resize_(0)
    >>> is_freed(tensor), is_freed(torch.ones(0))
    (True, False)
    """
    return not tensor.data_ptr() and tensor.numel() > 0 and not tensor.is_meta


def is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own that holds numbers, and no tracer or transform stands behind it.

    >>> is_real(torch.zeros(2)), torch.func.vmap(lambda row: row * is_real(row))(torch.ones(1)).tolist()
    (True, [0.0])
    """
    return type(tensor) in PLAIN and not (is_wrapped(tensor) or is_functional(tensor))


def may_keep(*tensors: Tensor | None) -> bool:
    """Return whether something may outlive the call that works it out; `tensors` are those in it.

    Nothing may while a tracer runs (torch.compile, torch.export, make_fx) or a mode stands between us and torch's
    operations, as FakeTensorMode does: sizes may be symbols then and tensors have no numbers, whether they tell or
    not. And nothing may in which a tensor is fake, functional, or wrapped by a transform of torch.func. What is made
    outside of the transforms, of tensors that they have not wrapped, is kept.

    >>> may_keep(torch.zeros(2), None)
    True
    >>> from torch._subclasses import FakeTensorMode
    >>> with FakeTensorMode():
    ...     may_keep(), may_keep(torch.zeros(2))
    (False, False)
    """
    if is_compiling() or modes() > 0:
        return False
    return all([tensor is None or is_real(tensor) for tensor in tensors])


class ChangeGuard:
    """Version, address and layout of one tensor, which is not kept alive: its memory alone is held.

    Make the guard before the tensor is read, since another thread may write to it meanwhile.

    >>> index = torch.tensor([0, 1])
    >>> guard = ChangeGuard(index)
    >>> guard.holds_for(index)
    True
    >>> index[0] = 1
    >>> guard.holds_for(index)
    False
    """

    __slots__ = ("address", "layout", "memory", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        lies_nowhere = is_wrapped(tensor) or is_functional(tensor)
        self.address = None if lies_nowhere else tensor.data_ptr()
        self.memory = tensor.untyped_storage() if not lies_nowhere and type(tensor) in PLAIN else None
        self.layout = tensor.shape, tensor.stride(), tensor.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> ChangeGuard | None:
        """Return the guard of a tensor; None if it does not tell when it changes, or lies nowhere."""
        return cls(tensor) if is_real(tensor) and not tensor.is_inference() else None

    def holds_for(self, tensor: Tensor) -> bool:
        """Return whether a tensor, the one that the guard was made of, has not changed since."""
        address = self.address
        if tensor._version != self.version or (address is not None and tensor.data_ptr() != address):
            return False
        # other memory from the same address on, as `x.data = x.data[:n]`
        return (tensor.shape, tensor.stride(), tensor.dtype) == self.layout


class Unsaved:
    """What is kept with a tensor, and is for that one alone: in a pickle it is an empty dictionary.

    It is of a kind that `torch.load` accepts with `weights_only`, so that a checkpoint may hold the tensor.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return OrderedDict, ()


Kept = TypeVar("Kept", bound="KeptGuard")


class KeptGuard(ChangeGuard, Unsaved):
    """A guard of a tensor that is an attribute of it, with what is known of the tensor: each kind has its attribute.

    >>> class Length(KeptGuard):
    ...     attribute = "_length"
    >>> index = torch.tensor([0, 1])
    >>> Length(index).keep(index)
    >>> Length.kept_with(index) is None, Length.kept_with(index.clone()) is None
    (False, True)
    """

    __slots__ = ("owner",)
    attribute: ClassVar[str]
    owner: ref[Tensor]  # from when it is kept on

    @classmethod
    def kept_with(cls: type[Kept], tensor: Tensor) -> Kept | None:
        """Return what is kept with a tensor; None if there is nothing, or the tensor has changed since.

        A copy of a tensor has its attributes, which are not about it, and one from a pickle an empty dictionary.
        """
        kept: Kept | None = getattr(tensor, cls.attribute, None)
        return kept if kept and kept.owner() is tensor and kept.holds_for(tensor) else None

    def keep(self, tensor: Tensor) -> None:
        """Keep this with the tensor that it was made of."""
        self.owner = ref(tensor)
        setattr(tensor, self.attribute, self)


class TensorsGuard:
    """Who several tensors are, with a guard of each; any of them may be None. Their memory alone is held.

    >>> index, other = torch.tensor([0, 1]), torch.tensor([0, 1])
    >>> guard = TensorsGuard((index, None))
    >>> guard.holds_for((index, None)), guard.holds_for((other, None)), guard.holds_for((index, other))
    (True, False, False)
    >>> index[0] = 1
    >>> guard.holds_for((index, None))
    False
    """

    __slots__ = ("guards", "owners")

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.guards = tuple([None if tensor is None else ChangeGuard(tensor) for tensor in tensors])
        self.owners = tuple([None if tensor is None else ref(tensor) for tensor in tensors])

    def holds_for(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return whether these are the tensors that the guard was made of, and none has changed since."""
        if len(tensors) != len(self.owners):
            return False
        for tensor, owner, guard in zip(tensors, self.owners, self.guards):
            if tensor is None or owner is None or guard is None:
                if tensor is not None or owner is not None:
                    return False
            elif owner() is not tensor or not guard.holds_for(tensor):
                return False
        return True


# (tensor, its version, what asks for its address, its address, its shape, what asks for its strides, its strides)
Check = tuple[Any, int, Callable[[], int], int, Any, Callable[[], Any], Any]


class _Inference:
    """An object that stands among the checked tensors for those that count no versions: its check always fails."""

    _version = -1


class ChangeGuards:
    """Versions, addresses and layouts of several tensors, with the tensors themselves.

    Tensors made in inference mode count no versions and are compared with a copy, unless `compares` is False: then
    their changes go unseen. A copy of a guard is one of the tensors' copies.

    If `is_private`, nobody else has the tensors: they never change, and none is looked at.

    >>> index = torch.tensor([0, 1])
    >>> guards = ChangeGuards([index, None])
    >>> guards.hold()
    True
    >>> index[0] = 1
    >>> guards.hold()
    False
    """

    __slots__ = ("checks", "compares", "copies", "is_private", "memory", "tensors", "values")

    def __init__(
        self,
        tensors: Iterable[Tensor | None],
        hold: bool = True,
        values: list[Tensor] | None = None,
        compares: bool = True,
        is_private: bool = False,
    ) -> None:
        self.tensors = tuple([tensor for tensor in tensors if tensor is not None])
        self.checks: tuple[Check, ...] = ()
        self.copies: list[tuple[Tensor, Tensor]] | None = []  # None: the tensors have changed, for good
        self.memory: list[Any] = []
        self.values, self.compares, self.is_private = values, compares, is_private
        if is_private or is_compiling():  # a tracer's tensors neither count versions nor lie anywhere
            return
        checks = [_check(tensor) for tensor in self.tensors if not tensor.is_inference()]
        self.memory = [tensor.untyped_storage() for tensor, _, _, address, *_ in checks if address]
        if not hold:
            self.copies = None
        elif compares:
            self.copies = [(tensor, _copy(tensor)) for tensor in self.tensors if tensor.is_inference()]
        if self.copies != []:
            checks.append((_Inference, 0, int, 0, None, int, 0))
        self.checks = tuple(checks)

    def hold(self) -> bool:
        """Return whether all tensors hold what they held, where they held it, in the same shapes."""
        for tensor, version, address, first_address, shape, strides, first_strides in self.checks:
            if tensor._version != version or address() != first_address:
                return tensor is _Inference and self._have_copied_values()
            if tensor.shape != shape or strides() != first_strides:  # as after `x.data = x.data[:n]`
                return False
        return True

    def _have_copied_values(self) -> bool:
        """Return whether the tensors of inference mode equal their copies; True during a capture."""
        if self.copies is None:
            return False
        if any(copy.is_cuda for _, copy in self.copies) and is_capturing():
            return True  # nothing can be read now
        return all(copy.shape == tensor.shape and torch.equal(copy, tensor) for tensor, copy in self.copies)

    def keep_values(self) -> None:
        """Copy the tensors' values, so that `renewed` can tell whether a write has changed them."""
        self.values = [_copy(tensor) for tensor in self.tensors]

    def have_kept_values(self) -> bool:
        """Return whether the tensors hold what they held when `keep_values` was called, wherever that lies by now."""
        return self.values is not None and all(
            tensor.shape == value.shape and tensor.device == value.device and torch.equal(tensor, value)
            for tensor, value in zip(self.tensors, self.values)
        )

    def renewed(self) -> ChangeGuards | None:
        """Return new guards if the tensors were written to in place with the values that they had; else None.

        DistributedDataParallel writes buffers so, at every step.
        """
        if self.values is None or self.copies is None:
            return None
        for tensor, _, address, first_address, shape, strides, first_strides in self.checks:
            if tensor is _Inference:
                continue
            if address() != first_address or tensor.shape != shape or strides() != first_strides:
                return None
        # before they are read: threads may write
        guards = ChangeGuards(self.tensors, True, self.values, self.compares)
        return guards if self.have_kept_values() else None

    def __reduce__(self) -> tuple[type[ChangeGuards], tuple[Any, ...]]:
        return ChangeGuards, (self.tensors, self.hold(), self.values, self.compares)


Stamp = ChangeGuards  # as pickles of version 0.1.0 call it, in a module `stamp`


class SparseChangeGuard:
    """Version and place of a torch sparse tensor, which is not kept alive.

    A module that is cast or moved gives its parameters other data, which is not counted. Of a COO tensor, which alone
    has a `.data` to set, the address of its values is compared; of others dtype and device are.
    """

    __slots__ = ("address", "device", "dtype", "memory", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version, self.dtype, self.device = tensor._version, tensor.dtype, tensor.device
        self.address: int | None = None
        self.memory: Any = None
        if tensor.layout is torch.sparse_coo and tensor._nnz() and not is_wrapped(tensor):
            with torch.inference_mode(False), torch._C._DisableFuncTorch():
                values = tensor._values()
                self.address, self.memory = values.data_ptr(), values.untyped_storage()  # not the values: they hold it

    @classmethod
    def of(cls, tensor: Tensor) -> SparseChangeGuard | None:
        """Return the guard of a sparse tensor; None if it does not tell when it changes, or nothing may be kept."""
        return cls(tensor) if may_keep() and not tensor.is_inference() else None

    def holds_for(self, tensor: Tensor) -> bool:
        """Return whether a sparse tensor, the one that the guard was made of, has not changed since."""
        if tensor._version != self.version:
            return False
        if self.address is not None:
            return _values_address(tensor) == self.address
        return tensor.dtype is self.dtype and tensor.device == self.device


def change_expression(name: str, tensor: Tensor, is_version_compared: bool) -> str:
    """Return the text by which a launch plan checks whether a tensor it calls `name` has moved or was written to.

    The text reads version and address itself, since a call of a guard would cost more than both. The plan holds the
    tensor, and so its memory until it moves.
    """
    has_moved = f"{address_expression(name)} != {address_of(tensor)}"
    return f"{name}._version != {tensor._version} or {has_moved}" if is_version_compared else has_moved


def guard_expression(guard: str, name: str, address: str, layout: str) -> str:
    """Return the text of `guard.holds_for(name)` for a tensor of a layout: its shape, its strides and its dtype.

    `address` is the text of its address. A call of a guard would cost three times as much.
    """
    is_unchanged = f"{name}._version == {guard}.version and {address} == {guard}.address"
    return f"{is_unchanged} and {guard}.layout == {layout}"


def address_expression(name: str) -> str:
    """Return the text by which a launch plan reads the address of a tensor it calls `name`; 0 without memory."""
    return f"{name}.data_ptr()"


def address_of(tensor: Tensor) -> int:
    """Return where a tensor begins in memory, as kernels take it."""
    return tensor.data_ptr()


def offset_in_memory(tensor: Tensor, base: Tensor) -> int | None:
    """Return how many bytes behind `base` a tensor begins; None if they do not share memory."""
    if tensor.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return None
    return tensor.data_ptr() - base.data_ptr()


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version of each tensor, 0 for those of inference mode: two lists differ if one was written to."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _check(tensor: Tensor) -> Check:
    """Return what `ChangeGuards.hold` compares of a tensor; one without memory has address 0."""
    address = tensor.data_ptr if is_real(tensor) else int
    return tensor, tensor._version, address, address(), tensor.shape, tensor.stride, tensor.stride()


def _values_address(tensor: Tensor) -> int:
    """Return where the values of a COO tensor lie."""
    if modes() > 0:  # among fake tensors the values of a real one would be a fake one, which lies nowhere
        with _disable_current_modes():
            return tensor._values().data_ptr()
    try:
        return tensor._values().data_ptr()
    except RuntimeError:  # wrapped by a transform, which costs more to ask about beforehand
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            return tensor._values().data_ptr()


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, to be kept: no part of inference mode, nor of a transform that has not wrapped it."""
    with torch.inference_mode(False):
        if not is_real(tensor):
            return tensor.detach().clone()
        with torch._C._DisableFuncTorch():
            return tensor.detach().clone()
