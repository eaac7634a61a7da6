"""Exports a module as it is imported: a second of a core, which forks of this process do not need again."""

from __future__ import annotations

import torch
from torch import nn

_MODULE = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
torch.export.export(_MODULE, (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
