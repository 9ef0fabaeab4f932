"""What is worked out about an object and kept for as long as it lives."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

__all__ = ["ByIdentity"]

Kept = TypeVar("Kept")


class ByIdentity(Generic[Kept]):
    """One value per object, told apart by identity and dropped when the object dies.

    Not an attribute of the object: that would travel along when a tensor is saved or copied. Not a
    WeakKeyDictionary: tensors compare element by element.

    >>> import torch
    >>> names, A = ByIdentity(), torch.ones(2)
    >>> names.keep(A, "A")
    >>> names.get(A), names.get(torch.ones(2)), len(names)
    ('A', None, 1)
    >>> del A
    >>> len(names)
    0
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[ref[object], Kept]] = {}

    def get(self, owner: object) -> Kept | None:
        kept = self.kept.get(id(owner))
        return kept[1] if kept is not None and kept[0]() is owner else None

    def keep(self, owner: object, value: Kept) -> None:
        key = id(owner)

        def drop(dead: ref[object]) -> None:
            kept = self.kept.get(key)
            if kept is not None and kept[0] is dead:  # another object may have the same address by now
                self.kept.pop(key, None)  # and may have died meanwhile, in another thread

        self.kept[key] = ref(owner, drop), value

    def drop(self, owner: object) -> None:
        if owner in self:
            self.kept.pop(id(owner), None)

    def __contains__(self, owner: object) -> bool:
        return self.get(owner) is not None

    def __len__(self) -> int:
        return len(self.kept)
