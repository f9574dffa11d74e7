"""Arrow's compute functions, for what a client loads too: `pyarrow.compute` with its first use."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Here: it describes hundreds of functions when it is imported, which takes as long as the rest
    # of a client's start.
    import pyarrow.compute

    # Kept, so that the next use of the function finds it in the module.
    found = globals()[name] = getattr(pyarrow.compute, name)
    return found
