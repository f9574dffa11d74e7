"""A delta plan as text for people: mode, reason, sources, and each stratum's tree and lookups."""

from __future__ import annotations

from collections.abc import Iterator

from actors.plan.delta import (
    Accumulate,
    Consolidate,
    DeltaPlan,
    Input,
    Lookup,
    Node,
    Pair,
    Reduce,
    Select,
    Union,
    Where,
)
from actors.plan.relational import Named


def explain(plan: DeltaPlan) -> str:
    """The plan as indented lines."""
    reason = f" ({plan.reason})" if plan.reason else ""
    lines = [f"mode: {plan.mode}{reason}"]
    for index, (name, schema) in enumerate(zip(plan.sources, plan.source_schemas, strict=True)):
        lines.append(f"source {index}: {name}({schema.ddl()})")
    lines.append(f"output: {plan.output.ddl()}")
    if plan.hidden is not None:
        keys = ", ".join(plan.hidden.keys) or "none: one row"
        lines.append(f"hidden: {plan.hidden.schema.ddl()}; keys: {keys}")
    lines += [f"conf: {key} = {value}" for key, value in plan.conf]
    if plan.mode == "opaque":
        lines.append("recomputed whole at each time and subtracted")
    for index, stratum in enumerate(plan.strata):
        lines.append(f"stratum {index}: reads {', '.join(stratum.inputs)}")
        lines += [f"  lookup {_lookup(lookup, plan)}" for lookup in stratum.lookups]
        lines += [f"  {line}" for line in _tree(stratum.node)]
    return "\n".join(lines)


def _lookup(lookup: Lookup, plan: DeltaPlan) -> str:
    target = lookup.target
    if target.startswith("s"):
        target += f" of {plan.sources[int(target[1:])]}"
    if not lookup.key:
        return f"{target}: whole state"
    origins = " and ".join(f"{name}({', '.join(columns)})" for name, columns in lookup.origins)
    return f"{target} by ({', '.join(lookup.key)}) from {origins}"


def _tree(node: Node) -> Iterator[str]:
    title, children = _describe(node)
    yield title
    for child in children:
        yield from (f"  {line}" for line in _tree(child))


def _describe(node: Node) -> tuple[str, tuple[Node, ...]]:
    match node:
        case Input():
            return f"Input {node.name}({', '.join(node.columns)})", ()
        case Where():
            return f"Where {node.predicate}", (node.input,)
        case Select():
            return f"Select {_named(node.columns)}", (node.input,)
        case Pair():
            equal = " and ".join(f"{left} = {right}" for left, right in node.equal) or "all pairs"
            residual = f" where {node.residual}" if node.residual else ""
            return f"Pair {equal}{residual}", (node.left, node.right)
        case Union():
            return "Union", node.inputs
        case Reduce():
            measures = [f"{m.name} = {m.kind}({m.argument}): {m.type}" for m in node.measures]
            return f"Reduce by ({_named(node.keys)}) {', '.join(measures)}".rstrip(), (node.input,)
        case Accumulate():
            return f"Accumulate by ({', '.join(node.keys)})", (node.contributions, node.hidden)
        case Consolidate():
            return "Consolidate", (node.input,)


def _named(columns: tuple[Named, ...]) -> str:
    return ", ".join(
        c.name if c.name == c.expression else f"{c.name} = {c.expression}" for c in columns
    )
