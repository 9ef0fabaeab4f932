"""Whether tensors still hold what was read of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .guard import is_real

__all__ = ["Stamp", "State"]

# (tensor, its version, what asks for its address, its address)
Counted = tuple[Any, int, Callable[[], int], int]


class _Unlike:
    """Stands among the counted ones for what has to be looked at more closely."""

    _version = -1


class Stamp:
    """The state of tensors: version counters, and addresses, since `.data = ...` counts no version.

    Tensors made in inference mode count none at all, and are compared with a copy. Memory that is known by its
    address is held, so that no other tensor can have it. A copy of a stamp is one of the tensors' copies.

    >>> index = torch.tensor([0, 1])
    >>> stamp = Stamp([index])
    >>> stamp.is_current()
    True
    >>> index[0] = 1
    >>> stamp.is_current()
    False
    """

    __slots__ = ("copies", "counted", "held", "layouts", "tensors", "values")

    def __init__(
        self, tensors: Iterable[Tensor | None], is_current: bool = True, values: list[Tensor] | None = None
    ) -> None:
        self.tensors = tuple([tensor for tensor in tensors if tensor is not None])
        self.counted: tuple[Counted, ...] = ()
        self.copies: list[tuple[Tensor, Tensor]] | None = []  # None: they are no longer what they were
        self.held: list[Any] = []
        self.layouts = _layouts(self.tensors)
        self.values = values
        if torch.compiler.is_compiling():  # a tracer's tensors neither count versions nor lie anywhere
            return
        counted = [_counted(tensor) for tensor in self.tensors if not tensor.is_inference()]
        self.held = [tensor.untyped_storage() for tensor, _, _, pointer in counted if pointer]
        self.copies = [(tensor, _copy(tensor)) for tensor in self.tensors if tensor.is_inference()]
        if not is_current:
            self.copies = None
        unlike: list[Counted] = [] if self.copies == [] else [(_Unlike, 0, int, 0)]
        self.counted = (*counted, *unlike)

    def is_current(self) -> bool:
        """They hold what they held, in the same shapes."""
        for tensor, version, data_ptr, pointer in self.counted:
            if tensor._version != version or data_ptr() != pointer:
                return tensor is _Unlike and self._are_alike()
        return _layouts(self.tensors) == self.layouts  # other memory from the same address on, as `x.data = x.data[:n]`

    def _are_alike(self) -> bool:
        if self.copies is None:
            return False
        if any(copy.is_cuda for _, copy in self.copies) and torch.cuda.is_current_stream_capturing():
            return True  # nothing can be read now
        return all(copy.shape == own.shape and torch.equal(copy, own) for own, copy in self.copies)

    def keep_values(self) -> None:
        """For tensors that are written to: `recounted` is to know whether with what was there."""
        self.values = [_copy(tensor) for tensor in self.tensors]

    def holds_values(self) -> bool:
        """The tensors hold what they held when `keep_values` was called, wherever that lies by now."""
        return self.values is not None and all(
            own.shape == value.shape and own.device == value.device and torch.equal(own, value)
            for own, value in zip(self.tensors, self.values)
        )

    def recounted(self) -> Stamp | None:
        """A stamp of tensors that were written to where they are with what was there; None: with anything else.

        DistributedDataParallel writes buffers so, at every step.
        """
        if self.values is None or self.copies is None or _layouts(self.tensors) != self.layouts:
            return None
        if any(data_ptr() != pointer for _, _, data_ptr, pointer in self.counted):
            return None
        fresh = Stamp(self.tensors, values=self.values)  # before they are read: another thread may write to them
        if not all(map(torch.equal, self.tensors, self.values)):
            return None
        return fresh

    def __reduce__(self) -> tuple[type[Stamp], tuple[Any, ...]]:
        return Stamp, (self.tensors, self.is_current(), self.values)


class State:
    """The state of one tensor, for who may not keep it alive: its memory alone is held."""

    __slots__ = ("dtype", "memory", "numel", "pointer", "strides", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version, self.pointer = tensor._version, tensor.data_ptr()
        self.numel, self.strides, self.dtype = tensor.numel(), tensor.stride(), tensor.dtype
        self.memory = tensor.untyped_storage()

    @classmethod
    def of(cls, tensor: Tensor) -> State | None:
        """None: the tensor does not tell when it changes, or lies nowhere."""
        return cls(tensor) if is_real(tensor) and not tensor.is_inference() else None

    def is_of(self, tensor: Tensor) -> bool:
        """That tensor has not changed."""
        if tensor._version != self.version or tensor.data_ptr() != self.pointer or tensor.dtype is not self.dtype:
            return False
        return tensor.numel() == self.numel and tensor.stride() == self.strides


def _layouts(tensors: Sequence[Tensor]) -> list[Any]:
    return [(tensor.shape, tensor.stride()) for tensor in tensors]


def _counted(tensor: Tensor) -> Counted:
    data_ptr = tensor.data_ptr if is_real(tensor) else int
    return tensor, tensor._version, data_ptr, data_ptr()


def _copy(tensor: Tensor) -> Tensor:
    """The values of a tensor, to be kept: no part of inference mode, nor of a transform that has not wrapped it."""
    with torch.inference_mode(False):
        if not is_real(tensor):
            return tensor.detach().clone()
        with torch._C._DisableFuncTorch():
            return tensor.detach().clone()
