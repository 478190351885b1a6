"""Which torch this is, where a name alone does not tell."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"
