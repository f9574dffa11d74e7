"""Penstock keeps Spark SQL views up to date: exact at every timestamp, at the cost of the changes.

The public names are `Service`, `Client`, `TableWrite`, `ChangeBatch`, `Settings`, `load_settings`
and the error classes of `actors.runtime.errors`. Heavy modules are imported on first use.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from actors.runtime import errors as errors
from actors.runtime.errors import *  # noqa: F403 - re-exports every error class
from actors.runtime.settings import Settings as Settings
from actors.runtime.settings import load as load_settings

if TYPE_CHECKING:
    from actors.doors.client.client import ChangeBatch as ChangeBatch
    from actors.doors.client.client import Client as Client
    from actors.doors.client.client import TableWrite as TableWrite
    from actors.service import Service as Service

# Imported on first use: a client never loads the service, and a service loads Spark only when it
# needs it.
_LAZY = {
    "ChangeBatch": "actors.doors.client.client",
    "Client": "actors.doors.client.client",
    "TableWrite": "actors.doors.client.client",
    "Service": "actors.service",
}

_ERRORS = tuple(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.PenstockError)
)

__all__ = ["ChangeBatch", "Client", "Service", "Settings", "TableWrite", "load_settings", *_ERRORS]


_FORMER = {"Change": "ChangeBatch"} | {
    old: new for old, new in errors.FORMER_CODES.items() if hasattr(errors, new)
}
"""Names of the previous release, kept for one more release."""


def __getattr__(name: str) -> Any:
    # For one release, the old name still works and warns with the new one.
    if name in _FORMER:
        new = _FORMER[name]
        warnings.warn(f"actors.{name} is now actors.{new}", DeprecationWarning, stacklevel=2)
        return globals()[new] if new in globals() else __getattr__(new)
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("actors"):
                raise
            hint = f"actors.{name}: {error}: pip install 'penstock-views[server]'"
            raise ModuleNotFoundError(hint, name=error.name) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
