"""The only room that knows torch versions (2.11 to 2.13): every private or moving torch name is met
here.

Each function says in plait's own terms what is needed and finds it in whichever torch is installed.
Nothing here compiles anything; nothing else in plait compares versions or reads fields that differ
between them.
"""

from __future__ import annotations

from plait.compat import autograd, decompositions, errors, precision, streams, tracing, versions

__all__ = ["autograd", "decompositions", "errors", "precision", "streams", "tracing", "versions"]
