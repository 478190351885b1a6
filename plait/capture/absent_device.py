"""Tracing for a GPU with a torch that was built without CUDA.

Fake tensors need no device. But some of torch's bindings (`x[0]`, `x.contiguous()`) switch to a
tensor's device before they call an operator: `on_device` has a guard that does nothing for that.
What asks the device itself becomes an error that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

from plait import _native
from plait.capture.trace_errors import users_line
from plait.errors import InternalError, Unsupported

_ASKED = re.compile(
    r"not linked with support for|not compiled with CUDA|No CUDA GPUs are available|NVIDIA driver"
)
_lock = RLock()


@contextmanager
def on_device(device: torch.device | None) -> Iterator[None]:
    """Inside, a model is traced and compiled for a device, None: where it is. Raises Unsupported
    where that takes the device itself."""
    if device is None or torch.cuda.is_available():
        yield
        return
    with _lock:
        guarded = _native.guard_for_cuda(True)
        try:
            yield
        except Exception as error:
            cause = error.__cause__ if isinstance(error, InternalError) else error
            if not isinstance(cause, Exception) or not _ASKED.search(str(cause)):
                raise
            raise Unsupported(
                f"a package for {device} of a model that asks the device while it is traced, and "
                "there is none here",
                where=users_line(cause),
                hint=(
                    "take the device of an argument (x.device), or package on a machine with such "
                    "a GPU"
                ),
            ) from error
        finally:
            if guarded:
                _native.guard_for_cuda(False)
