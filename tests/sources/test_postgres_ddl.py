"""Tables that change while they are read: whatever becomes of their columns, partitions and
publication, what is held is what PostgreSQL holds, or the table says what is wrong with it.
"""

from __future__ import annotations

import pytest
from postgres_fuzz import Fuzz  # type: ignore[import-not-found]
from postgres_house import House  # type: ignore[import-not-found]


@pytest.mark.parametrize("seed", range(4))
async def test_random_changes_of_tables_and_rows(db: House, seed: int) -> None:
    fuzz = Fuzz(db, seed)
    await fuzz.run(6)
    assert fuzz.counts["quiet"]
