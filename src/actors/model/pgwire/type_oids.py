"""OIDs, array types and sizes of PostgreSQL's types, and the epoch of its times.

This module does not import Arrow, because a WAL acceptor answers with these types and has no
tables.
"""

from __future__ import annotations

from typing import Final

import msgspec

BOOL, BYTEA, CHAR, NAME, INT8, INT2, INT2VECTOR, INT4 = 16, 17, 18, 19, 20, 21, 22, 23
REGPROC, TEXT, OID, TID, XID, CID, OIDVECTOR, JSON = 24, 25, 26, 27, 28, 29, 30, 114
PG_NODE_TREE, FLOAT4, FLOAT8, UNKNOWN, INET, ACLITEM = 194, 700, 701, 705, 869, 1033
BPCHAR, VARCHAR, DATE, TIME, TIMESTAMP, TIMESTAMPTZ = 1042, 1043, 1082, 1083, 1114, 1184
INTERVAL, TIMETZ, BIT, VARBIT, NUMERIC = 1186, 1266, 1560, 1562, 1700
REGPROCEDURE, REGOPER, REGOPERATOR, REGCLASS, REGTYPE = 2202, 2203, 2204, 2205, 2206
RECORD, CSTRING, ANYARRAY, VOID, ANYELEMENT = 2249, 2275, 2277, 2278, 2283
UUID, PG_LSN, REGCONFIG, REGDICTIONARY, JSONB = 2950, 3220, 3734, 3769, 3802
REGNAMESPACE, REGROLE, REGCOLLATION, XID8 = 4089, 4096, 4191, 5069

DAYS_TO_2000: Final = 10_957
MS_TO_2000: Final = 946_684_800_000
US_TO_2000: Final = 1000 * MS_TO_2000
"""PostgreSQL's binary dates and times count from 2000, Arrow's from 1970."""


class PgType(msgspec.Struct, frozen=True):
    """A type as in RowDescription."""

    oid: int
    size: int
    """Size of a value in PostgreSQL's memory in bytes; -1 if it varies."""
    modifier: int = -1


_SIZES: Final = {
    BOOL: 1,
    INT8: 8,
    INT2: 2,
    INT4: 4,
    OID: 4,
    FLOAT4: 4,
    FLOAT8: 8,
    DATE: 4,
    TIME: 8,
    TIMESTAMP: 8,
    TIMESTAMPTZ: 8,
    INTERVAL: 16,
    UUID: 16,
    NAME: 64,
    UNKNOWN: -2,
}
ARRAY_OF: Final = {
    BOOL: 1000,
    BYTEA: 1001,
    CHAR: 1002,
    NAME: 1003,
    INT2: 1005,
    INT2VECTOR: 1006,
    INT4: 1007,
    REGPROC: 1008,
    TEXT: 1009,
    TID: 1010,
    XID: 1011,
    CID: 1012,
    OIDVECTOR: 1013,
    BPCHAR: 1014,
    VARCHAR: 1015,
    INT8: 1016,
    FLOAT4: 1021,
    FLOAT8: 1022,
    OID: 1028,
    ACLITEM: 1034,
    INET: 1041,
    TIMESTAMP: 1115,
    DATE: 1182,
    TIME: 1183,
    TIMESTAMPTZ: 1185,
    INTERVAL: 1187,
    NUMERIC: 1231,
    CSTRING: 1263,
    JSON: 199,
    REGPROCEDURE: 2207,
    REGOPER: 2208,
    REGOPERATOR: 2209,
    REGCLASS: 2210,
    REGTYPE: 2211,
    RECORD: 2287,
    UUID: 2951,
    PG_LSN: 3221,
    REGCONFIG: 3735,
    REGDICTIONARY: 3770,
    JSONB: 3807,
    REGNAMESPACE: 4090,
    REGROLE: 4097,
    REGCOLLATION: 4192,
    XID8: 271,
}
"""Array type of each type."""


def sized(oid: int, modifier: int = -1) -> PgType:
    """Return a type with its size."""
    return PgType(oid, _SIZES.get(oid, -1), modifier)
