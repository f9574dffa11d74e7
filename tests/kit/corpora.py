"""Public corpora: the queries of TPC-H, TPC-DS and NEXMark as views, and rows for their tables.

`CORPORA` has each corpus with its tables. `read_queries` reads the queries in a folder, one per
file, with the comment that describes the shape of the query. `make_tables` makes the rows at a
scale: TPC-H by ``tpchgen-cli``, TPC-DS by ``tpcgen-cli``, NEXMark by a generator of our own. Below
`TPCDS_SCALE_MIN`, the rows of TPC-DS are a sample of that scale's: complete tickets and orders with
their returns, and the rows of the large dimensions to which they refer.

Rules
- The same scale and seed give the same rows.
- At small scales few rows pass the filters of the queries, and an empty view checks little. So
  every other value of a filtered column of a dimension is one with which the queries compare
  (`sharpen_values`), and sales of TPC-DS are concentrated on some months and customers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.connectors.sources import nexmark
from actors.connectors.sources.tpch import SCHEMAS as TPCH
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.runtime.errors import InvalidUsage
from tests.kit.tpcds import SCHEMAS as TPCDS

NEXMARK_EVENTS: Final = 10_000_000
"""Number of events at scale 1."""
NEXMARK_RATE: Final = 50.0
"""Events per second of event time; low, so that few events fill many windows."""
TPCDS_SCALE_MIN: Final = 0.01
_SHARED_BY: Final = {
    "store_sales": "ss_ticket_number",
    "store_returns": "sr_ticket_number",
    "catalog_sales": "cs_order_number",
    "catalog_returns": "cr_order_number",
    "web_sales": "ws_order_number",
    "web_returns": "wr_order_number",
    "inventory": "inv_item_sk",
}
"""Fact tables, and the column by which they are sampled."""
_REFERRED: Final = {
    "date_dim": r"(ss|cs|ws|inv|sr|cr|wr|c_first)_(\w+_)?date_sk",
    "time_dim": r"\w+_time_sk",
    "customer_demographics": r"\w+_cdemo_sk",
    "household_demographics": r"\w+_hdemo_sk",
}
"""Dimensions of which only referenced rows are kept, and the columns that refer to them."""
_KEPT_YEARS: Final = (1998, 2003)
"""All dates of these years are kept."""
_HASH: Final = 2_654_435_761


class QueryCorpus(NamedTuple):
    """The tables of the queries, and those whose values are sharpened."""

    name: str
    tables: Mapping[str, TableSchema]
    sharpened: tuple[str, ...] = ()


class CorpusQuery(msgspec.Struct, frozen=True):
    """The text of a view. `shape` describes the query in one line."""

    corpus: str
    name: str
    shape: str
    sql: str


CORPORA: Final = {
    corpus.name: corpus
    for corpus in (
        QueryCorpus("tpch", TPCH, ("part",)),
        QueryCorpus(
            "nexmark",
            {"person": nexmark.PERSON, "auction": nexmark.AUCTION, "bid": nexmark.BID},
        ),
        QueryCorpus(
            "tpcds",
            TPCDS,
            (
                "call_center", "customer", "customer_address", "customer_demographics",
                "household_demographics", "item", "promotion", "reason", "store", "web_page",
                "web_site",
            ),
        ),
    )
}  # fmt: skip
"""All corpora by name."""


def read_queries(folder: Path, corpus: str) -> list[CorpusQuery]:
    """Return the queries in ``folder/corpus/*.sql``, in order."""
    found = []
    for path in sorted((folder / corpus).glob("*.sql")):
        head, _, sql = path.read_text().partition("\n")
        if not head.startswith("-- "):
            raise InvalidUsage(f"{path}: the first line must say what shape the query is")
        found.append(CorpusQuery(corpus, path.stem, head[3:], sql.strip()))
    return found


def tables_of(query: CorpusQuery) -> dict[str, TableSchema]:
    """Return the tables whose names occur in a query."""
    words = set(re.findall(r"\w+", query.sql.lower()))
    return {n: s for n, s in CORPORA[query.corpus].tables.items() if n in words}


def make_tables(
    corpus: str, scale: float, seed: int, scratch: Path, queries: Iterable[CorpusQuery] = ()
) -> dict[str, pa.Table]:
    """Make the rows of all tables, in the types of their schemas. Blocks.

    Args:
        corpus: Its name in `CORPORA`.
        scale: The benchmark's scale factor; 1 is a gigabyte, or ten million events of NEXMark.
        seed: The seed of NEXMark's rows and of the sharpened values.
        scratch: An existing folder for the generator's files.
        queries: The queries for which the tables are sharpened.

    Raises:
        InvalidUsage: The generator is not installed, or does not support the scale.
    """
    match corpus:
        case "tpch":
            tables = _generated("tpchgen-cli", [], TPCH, scale, scratch)
        case "tpcds":
            least = max(scale, TPCDS_SCALE_MIN)
            tables = _generated("tpcgen-cli", ["tpcds"], TPCDS, least, scratch)
            if scale < TPCDS_SCALE_MIN:
                tables = _share(tables, scale / TPCDS_SCALE_MIN)
        case _:
            tables = _nexmark(int(scale * NEXMARK_EVENTS), seed)
    queries = list(queries)
    literals = asked_literals(query.sql for query in queries)
    for name in CORPORA[corpus].sharpened if literals else ():
        tables[name] = sharpen_values(tables[name], CORPORA[corpus].tables[name], literals, seed)
    if corpus == "tpcds" and literals:
        tables = _crowded(tables, [query.sql for query in queries])
    return tables


def _generated(
    tool: str, words: list[str], schemas: Mapping[str, TableSchema], scale: float, scratch: Path
) -> dict[str, pa.Table]:
    beside = Path(sys.executable).parent / tool
    found = str(beside) if beside.is_file() else shutil.which(tool)
    if found is None:
        raise InvalidUsage(f"{tool} is not installed: pip install {tool}")
    folder = scratch / f"{tool}-{scale}"
    command = [found, *words, "parquet", "-s", repr(scale), "--output-dir", str(folder)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        raise InvalidUsage(f"{tool} failed: {made.stderr.decode(errors='replace')[-500:]}")
    tables = {}
    for name, schema in schemas.items():
        rows = pq.read_table(folder / f"{name}.parquet").select(schema.names)
        tables[name] = rows.cast(schema.arrow())
    shutil.rmtree(folder)
    return tables


def _nexmark(events: int, seed: int) -> dict[str, pa.Table]:
    series = nexmark.NexmarkSeries(nexmark.NexmarkConfig(seed=seed, event_rate=NEXMARK_RATE))
    found: dict[str, list[pa.Table]] = {name: [] for name in CORPORA["nexmark"].tables}
    for rows in series.contents(events, frozenset(found)):
        found[rows.export].append(rows.updates)
    return {
        name: pa.concat_tables(rows).select(CORPORA["nexmark"].tables[name].names).combine_chunks()
        for name, rows in found.items()
    }


# -- a sample of TPC-DS ----------------------------------------------------------------------------


def _share(tables: Mapping[str, pa.Table], share: float) -> dict[str, pa.Table]:
    """Sample the facts, and keep the rows of the large dimensions to which they refer."""
    taken = dict(tables)
    for name, column in _SHARED_BY.items():
        numbers = tables[name][column].to_numpy().astype(np.uint64)
        drawn = numbers * np.uint64(_HASH) % np.uint64(1 << 32)
        taken[name] = tables[name].filter(pa.array(drawn < np.uint64(int(share * (1 << 32)))))
    for name, refers in _REFERRED.items():
        key = tables[name].schema.names[0]
        values = [
            column
            for other, rows in taken.items()
            for word, column in zip(rows.schema.names, rows.columns, strict=True)
            if other not in _REFERRED and re.fullmatch(refers, word)
        ]
        wanted = pa.chunked_array([chunk for column in values for chunk in column.chunks])
        kept = pc.is_in(tables[name][key], value_set=pc.unique(wanted))
        if name == "date_dim":
            year = tables[name]["d_year"]
            first, last = _KEPT_YEARS
            kept = pc.or_(kept, pc.and_(pc.greater_equal(year, first), pc.less_equal(year, last)))
        taken[name] = tables[name].filter(kept)
    return taken


_FACT_DATE: Final = re.compile(r"(ss|cs|ws)_(sold|ship)_date_sk|(sr|cr|wr)_returned_date_sk")
_FACT_CUSTOMER: Final = re.compile(r"(ss|sr|cs|cr|ws|wr)_(\w+_)?customer_sk")
_MONTH: Final = re.compile(
    r"d_year = (\d+) and (?:\w+\.)?d_moy = (\d+)|d_moy = (\d+) and (?:\w+\.)?d_year = (\d+)"
)
CROWD: Final = 40
"""Customers to whom every other sale is moved."""


def _crowded(tables: Mapping[str, pa.Table], texts: Sequence[str]) -> dict[str, pa.Table]:
    """Move every other date of the facts into months by which queries filter, and every other
    customer into a small group. A date or customer is moved the same way in all tables, so joins
    still match."""
    months = {
        (int(found[1] or found[4]), int(found[2] or found[3]))
        for text in texts
        for found in _MONTH.finditer(text)
    }
    days = tables["date_dim"].select(["d_date_sk", "d_year", "d_moy"]).to_pylist()
    hot = np.array([d["d_date_sk"] for d in days if (d["d_year"], d["d_moy"]) in months], np.int64)
    made = dict(tables)
    for name in _SHARED_BY:
        for index, column in enumerate(made[name].schema.names):
            is_date = _FACT_DATE.fullmatch(column) is not None
            if (is_date and len(hot)) or _FACT_CUSTOMER.fullmatch(column):
                old = made[name][column]
                numbers = pc.fill_null(old, 0).to_numpy().astype(np.int64)
                moved = hot[numbers % len(hot)] if is_date else numbers % CROWD + 1
                chosen = np.where(numbers * _HASH % 8 < 4, moved, numbers)
                array = pa.array(chosen, mask=pc.is_null(old).to_numpy()).cast(old.type)
                made[name] = made[name].set_column(index, column, array)
    return made


# -- values for which the queries ask --------------------------------------------------------------

_NUMBER: Final = r"-?\d+(?:\.\d+)?"
_EQUALS: Final = re.compile(rf"(\w+)\s*=\s*('[^']*'|{_NUMBER})")
_IN: Final = re.compile(r"(\w+)\s+in\s*\(([^()]*)\)")
_BETWEEN: Final = re.compile(rf"(\w+)\s+between\s+({_NUMBER})\s+and\s+({_NUMBER})")
_LITERAL: Final = re.compile(rf"'[^']*'|{_NUMBER}")


def asked_literals(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return the literals with which texts compare each name, without duplicates.

    >>> asked_literals(["a = 1 and b in ('x', 'y') and a between 3 and 9"])
    {'a': ['1', '3', '9'], 'b': ["'x'", "'y'"]}
    """
    found: dict[str, dict[str, None]] = {}
    for text in texts:
        for form in (_EQUALS, _IN, _BETWEEN):
            for each in form.finditer(text):
                literals = _LITERAL.findall(" ".join(each.groups()[1:]))
                found.setdefault(each[1], {}).update(dict.fromkeys(literals))
    return {name: list(literals) for name, literals in found.items()}


def _values(literals: Iterable[str], column: TableColumn) -> list[Any]:
    """Return those literals that are values of a column's type."""
    if column.type == "string":
        return [literal[1:-1] for literal in literals if literal[0] == "'"]
    numbers = [literal for literal in literals if literal[0] != "'"]
    if column.type in ("int", "bigint"):
        return [int(literal) for literal in numbers if "." not in literal]
    if column.type.startswith("decimal"):
        return [Decimal(literal) for literal in numbers]
    return []


def sharpen_values(
    rows: pa.Table, schema: TableSchema, literals: Mapping[str, Sequence[str]], seed: int
) -> pa.Table:
    """Replace every other value of each column by which texts filter with one of their literals."""
    random = np.random.default_rng([seed, *schema.names[0].encode()])
    for index, column in enumerate(schema.columns):
        values = _values(literals.get(column.name, ()), column)
        if column.name in schema.key or not values:
            continue
        order = random.permutation(rows.num_rows)
        asked = pa.array(values).cast(arrow_type(column.type))
        drawn = asked.take(pa.array(random.integers(0, len(values), rows.num_rows)))
        made = pc.if_else(pa.array(order % 2 == 0), drawn, rows[column.name].combine_chunks())
        rows = rows.set_column(index, rows.schema.field(index), made)
    return rows
