"""Keys of a GROUP BY that distinguish floats and maps that Spark's own grouping would merge."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from actors.model.plan.schema import TableSchema, arrow_type, quote


def types_of(schema: TableSchema) -> dict[str, str]:
    """Return the type of each column of a schema."""
    return {column.name: column.type for column in schema.columns}


def exact_keys(kinds: Mapping[str, str], *, only_maps: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the grouping keys, by column, of columns that cannot be grouped by themselves.

    `kinds`: Spark's types of the columns. `only_maps`: floats are grouped as Spark does.

    >>> exact_keys({"k": "int", "x": "array<double>"})
    {'x': ('`x`', 'CAST(`x` AS string)')}
    """
    found = {}
    for name, kind in kinds.items():
        low, column = kind.lower(), quote(name)
        # GROUP BY treats -0.0 as 0.0 and all NaNs as equal; their texts differ.
        floats = any(word in low for word in ("float", "double", "real")) and not only_maps
        # Spark (4.3, generated code) first sorts a map and then reads a NULL value as what was in
        # its place before, so it merges rows that differ. It groups arrays of entries correctly.
        if "map<" in low:
            keys: tuple[str, ...] = (entries_of(column, arrow_type(kind)),)
        elif floats:
            keys = (column,)
        else:
            continue
        found[name] = (*keys, f"CAST({keys[0]} AS string)") if floats else keys
    return found


def entries_of(value: str, kind: pa.DataType, depth: int = 0) -> str:
    """Return an expression without maps that is equal for two values if and only if the values are.

    >>> print(entries_of("m", pa.map_(pa.string(), pa.int32())))
    array_sort(map_entries(m), (a0, b0) -> CASE WHEN a0.key < b0.key THEN -1 ELSE 1 END)
    """
    element = f"e{depth}"
    if pa.types.is_map(kind):
        order = f"CASE WHEN a{depth}.key < b{depth}.key THEN -1 ELSE 1 END"
        entries = f"array_sort(map_entries({value}), (a{depth}, b{depth}) -> {order})"
        inner = entries_of(f"{element}.value", kind.item_type, depth + 1)
        if inner == f"{element}.value":
            return entries
        made = f"named_struct('k', {element}.key, 'v', {inner})"
        return f"transform({entries}, {element} -> {made})"
    if pa.types.is_list(kind):
        inner = entries_of(element, kind.value_type, depth + 1)
        return value if inner == element else f"transform({value}, {element} -> {inner})"
    if pa.types.is_struct(kind):
        fields = [(field, f"{value}.{quote(field.name)}") for field in kind]
        inner_fields = [entries_of(text, field.type, depth + 1) for field, text in fields]
        if inner_fields == [text for _, text in fields]:
            return value
        named = (f", 'f{place}', {text}" for place, text in enumerate(inner_fields))
        return f"named_struct('n', {value} IS NULL{''.join(named)})"
    return value
