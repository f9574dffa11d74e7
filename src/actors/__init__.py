"""Penstock keeps Spark SQL views fresh: live, exact at every time, at the cost of the changes.

The public names: `Service`, `Client`, `TableWrite`, `ChangeBatch`, `Settings`, `load_settings` and
the error family (`actors.runtime.errors`). Heavy parts are imported on first use.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from actors.runtime import errors as errors
from actors.runtime.errors import *  # noqa: F403 - the error family is all of it
from actors.runtime.settings import Settings as Settings
from actors.runtime.settings import load as load_settings

if TYPE_CHECKING:
    from actors.doors.client.client import ChangeBatch as ChangeBatch
    from actors.doors.client.client import Client as Client
    from actors.doors.client.client import TableWrite as TableWrite
    from actors.service import Service as Service

# Imported when first used: a client loads no service, and a service no Spark before it needs it.
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
"""Names of the release before: understood for one more."""


def __getattr__(name: str) -> Any:
    # One release long: who used the former name is told the new one.
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
