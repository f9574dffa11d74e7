"""Objects of the service that clients use, and their rows. Uses only the standard library.

- ``kinds``: 10,000 rows with a column of every type. In every tenth, all but ``id`` are NULL.
- ``orders``: 1,000 rows with a PRIMARY KEY, an index ``by_customer``, and a view ``spent`` over it.
- ``many``: 200,000 rows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

KINDS_ROWS: Final = 10_000
ORDERS_ROWS: Final = 1_000
MANY_ROWS: Final = 200_000
NULL_EVERY: Final = 10
PREPARED: Final = 200
"""How often a prepared statement is run."""
CUSTOMERS: Final = 10

KINDS: Final[Mapping[str, str]] = {
    "id": "bigint",
    "flag": "boolean",
    "tiny": "tinyint",
    "small": "smallint",
    "whole": "int",
    "large": "bigint",
    "single": "float",
    "twice": "double",
    "amount": "decimal(20,3)",
    "word": "string",
    "short": "varchar(20)",
    "fixed": "char(6)",
    "raw": "binary",
    "day": "date",
    "moment": "timestamp",
    "clock": "timestamp_ntz",
    "list": "array<int>",
    "words": "array<string>",
    "pairs": "map<string,int>",
    "both": "struct<a:int,b:double>",
}
"""Columns of ``kinds`` and their types."""
ORDERS: Final[Mapping[str, str]] = {
    "id": "bigint",
    "customer": "string",
    "amount": "decimal(12,2)",
}
MANY: Final[Mapping[str, str]] = {"id": "bigint", "x": "double", "s": "string"}
SPENT: Final = "SELECT customer, count(*) AS n, sum(amount) AS total FROM orders GROUP BY customer"
"""The view's query."""
LENGTHS: Final = "SELECT word, count(*) AS n FROM words GROUP BY word"
"""The query of a view that clients create."""
_FIRST_DAY: Final = dt.date(2000, 1, 1)
_FIRST_MOMENT: Final = dt.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)


def is_null_row(number: int) -> bool:
    """Return whether all columns but ``id`` are NULL in row `number` of ``kinds``."""
    return number % NULL_EVERY == NULL_EVERY - 1


def kinds_row(number: int) -> dict[str, Any]:
    """Return a row of ``kinds``."""
    if is_null_row(number):
        return {"id": number, **dict.fromkeys(list(KINDS)[1:])}
    moment = _FIRST_MOMENT + dt.timedelta(seconds=number)
    return {
        "id": number,
        "flag": number % 2 == 1,
        "tiny": number % 100,
        "small": number % 30_000,
        "whole": -3 * number,
        "large": number * 10**12,
        "single": number + 0.5,
        "twice": number / 8,
        "amount": Decimal(number) + Decimal("0.125"),
        "word": f"text {number} ü, 'quoted'",
        "short": f"s{number % 1000}",
        "fixed": f"c{number % 100}".ljust(6),
        "raw": bytes([number % 256, 0, 255]),
        "day": _FIRST_DAY + dt.timedelta(days=number),
        "moment": moment,
        "clock": moment.replace(tzinfo=None),
        "list": [number, None, number + 1],
        "words": ["a", 'b"c'],
        "pairs": {"k": number},
        "both": {"a": number, "b": 0.5},
    }


def orders_row(number: int) -> dict[str, Any]:
    """Return a row of ``orders``."""
    return {
        "id": number,
        "customer": f"customer {number % CUSTOMERS}",
        "amount": Decimal(number) / 4,
    }


def spent_rows() -> list[tuple[str, int, Decimal]]:
    """Return the rows of ``spent``, in the order of customers."""
    rows = [orders_row(number) for number in range(ORDERS_ROWS)]
    found = []
    for customer in sorted({row["customer"] for row in rows}):
        amounts = [row["amount"] for row in rows if row["customer"] == customer]
        found.append((customer, len(amounts), sum(amounts, Decimal(0))))
    return found
