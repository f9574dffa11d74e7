"""Random queries that are plain reads of one table, and rows for it."""

from __future__ import annotations

import datetime
import random
from typing import Any

COLUMNS = {"k": "bigint", "s": "string", "n": "int", "b": "boolean", "d": "date", "f": "double"}


def rows_of(dice: random.Random, count: int = 40) -> list[dict[str, Any]]:
    """Rows of few values, with NULLs."""

    def maybe(value: Any) -> Any:
        return None if dice.random() < 0.2 else value

    return [
        {
            "k": k,
            "s": maybe(dice.choice(["", "a", "B", "bb", "é"])),
            "n": maybe(dice.randint(-3, 3)),
            "b": maybe(dice.random() < 0.5),
            "d": maybe(datetime.date(2020, 1, dice.randint(1, 5))),
            "f": maybe(dice.choice([-2.0, -0.5, 0.0, 1.0, 1.5])),
        }
        for k in range(count)
    ]


def sql_of(dice: random.Random) -> tuple[str, bool]:
    """A query that is a plain read, and whether its answer has an order."""
    names = dice.sample(sorted(COLUMNS), dice.randint(1, 6))
    chosen = ", ".join(n if dice.random() < 0.7 else f"t.{n} AS a_{n}" for n in names)
    tests = []
    for _ in range(dice.choice([0, 0, 1, 1, 2, 3])):
        op = dice.choice(["=", "<>", "<", "<=", ">", ">="])
        column = dice.choice(sorted(COLUMNS))
        literal = {
            "k": str(dice.randint(-2, 40)),
            "n": str(dice.randint(-3, 3)),
            "s": f"'{dice.choice(['', 'a', 'B', 'bb', 'é'])}'",
            "b": dice.choice(["true", "false"]),
            "d": f"DATE '2020-01-0{dice.randint(1, 5)}'",
            "f": str(dice.randint(-2, 2)),
        }[column]
        if dice.random() < 0.2:
            tests.append(f"{column} IS {dice.choice(['', 'NOT '])}NULL")
        elif dice.random() < 0.3:
            tests.append(f"{literal} {op} {column}")
        else:
            tests.append(f"{column} {op} {literal}")
    sql = f"SELECT {chosen} FROM t" + (f" WHERE {' AND '.join(tests)}" if tests else "")
    if dice.random() < 0.5:
        return sql, False
    nulls = ["", " NULLS FIRST", " NULLS LAST"]
    others = dice.sample([name for name in sorted(COLUMNS) if name != "k"], dice.randint(0, 2))
    # A key at the end makes the order total, so that a limit leaves no choice.
    keys = [f"t.{name}{dice.choice(['', ' DESC'])}{dice.choice(nulls)}" for name in others]
    sql += f" ORDER BY {', '.join([*keys, 't.k'])}"
    if dice.random() < 0.6:
        sql += f" LIMIT {dice.randint(0, 12)}"
        if dice.random() < 0.5:
            sql += f" OFFSET {dice.randint(0, 8)}"
    return sql, True
