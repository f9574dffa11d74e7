"""Arrow's compute functions for modules that clients load: imports `pyarrow.compute` on first
use."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Imported here, because the module describes hundreds of functions on import, which takes as
    # long as the rest of a client's start.
    import pyarrow.compute

    # Cache the function, so that its next use finds it in this module.
    found = globals()[name] = getattr(pyarrow.compute, name)
    return found
