"""Torch's numerical checks of gradients: along random directions, or entry by entry where tests are thorough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from statements import IS_INTERPRETED, IS_THOROUGH
from torch import autograd

__all__ = ["gradcheck", "gradgradcheck"]

# A wrong entry of a Jacobian shows along almost every direction; entry by entry a check calls the function for each.
IS_FAST = IS_INTERPRETED or not IS_THOROUGH

ANY_ORDER = 1e-12  # by which two runs may differ where programs of a kernel add to one sum
gradcheck: Callable[..., bool] = partial(autograd.gradcheck, fast_mode=IS_FAST, nondet_tol=ANY_ORDER)
gradgradcheck: Callable[..., bool] = partial(autograd.gradgradcheck, fast_mode=IS_FAST, nondet_tol=ANY_ORDER)
