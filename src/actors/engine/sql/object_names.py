"""Resolves names of objects, with or without a catalog and a schema. Pure."""

from __future__ import annotations

from typing import Final

from actors.engine.sql.statements import QualifiedName
from actors.runtime.errors import InvalidUsage

SCHEMAS: Final = frozenset({"public", "default"})
"""Names of the single schema that contains all objects: PostgreSQL's name and Spark's."""
DATABASE: Final = "penstock"
"""Name of the database. It is also the schema of the relations that describe the service."""
CATALOGS: Final = frozenset({DATABASE, "spark_catalog"})


def object_name(name: QualifiedName) -> str:
    """Return the name of an object without its catalog and schema.

    >>> object_name(("penstock", "public", "orders"))
    'orders'
    >>> object_name(("penstock", "objects"))
    'penstock.objects'

    Raises:
        InvalidUsage: The name is of another catalog or schema.
    """
    parts = list(name)
    if len(parts) == 3 and parts[0].lower() in CATALOGS:
        del parts[0]
    if len(parts) == 2 and parts[0].lower() in SCHEMAS:
        del parts[0]
    if len(parts) == 2 and parts[0].lower() == DATABASE:
        return f"{DATABASE}.{parts[1]}"
    if len(parts) != 1:
        raise InvalidUsage(
            f"{'.'.join(name)}: all objects are in the schema public; write {parts[-1]}"
        )
    return parts[0]
