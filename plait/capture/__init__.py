"""The front end: `backend` for torch.compile, `export` for plait.compile. Both end in `Captured`
graphs."""

import torch

from plait.runtime.cubin_pool import start_early

if torch.version.cuda is not None:
    start_early()  # before the compiler itself is imported
