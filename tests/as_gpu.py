"""A plugin for pytest: cases collected as on a machine with a GPU; none can run."""

from __future__ import annotations

import torch

torch.cuda.is_available = lambda: True
