"""Expressions of Spark SQL written again by `ExpressionWriter`, and compared with the original.

A program of its own (``python expression_lab.py FILE``), because it needs the inside of an
engine. FILE holds JSON: the expressions to write, how many functions of the documentation there is
one looked at of (`one_in`), and the archive that the JVM starts from. Prints one JSON line: by
function or expression, what was not rendered, and what differs; and all functions' names.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from actors.engine.catalyst.expressions import ExpressionWriter
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import TreeNode, parse_tree, walk
from actors.engine.catalyst.special_forms import type_of
from actors.engine.spark.catalyst_front import function_names
from actors.engine.spark.class_archive import archive_options
from actors.engine.spark.java import java_object
from actors.model.plan.schema import quote

CHARACTERS_MAX = 10_000_000
BATCH = 32
EXAMPLES = 2
COLUMNS = """
    i int, j int, l bigint, h smallint, y tinyint, f float, d double, c decimal(10,2),
    e decimal(38,18), s string, u string, b boolean, p boolean, x binary, t date, at timestamp,
    n timestamp_ntz, ym interval year to month, dt interval day to second, ci interval,
    a array<int>, sa array<string>, m map<string,int>, r struct<k:int,v:string>,
    ra array<struct<k:int,v:string>>, aa array<array<int>>, v variant
"""
CLOCKS = ("CurrentTimestamp", "CurrentDate", "Now", "LocalTimestamp", "CurrentTime")
BEHIND = re.compile(r"\bFROM\b(?![^(]*\))", re.IGNORECASE)


class RefusedBySpark(Exception):
    """Spark does not analyse a text."""


class ExpressionLab:
    """One session, with one empty table `cols` of a column of each type."""

    def __init__(self, session: SparkSession, *, ansi: bool, raw: bool = False) -> None:
        self.session = session
        self.ansi = ansi
        self.raw = raw
        session.conf.set("spark.sql.parser.escapedStringLiterals", str(raw).lower())
        session.conf.set("spark.sql.ansi.enabled", str(ansi).lower())
        gateway = session._sc._gateway
        self.dump = java_object(gateway, "PlanDump")
        self.inspector = java_object(gateway, "PlanInspector")
        self.functions = function_names(gateway, session._jsparkSession)
        rows = session.sparkContext.emptyRDD()
        session.createDataFrame(rows, COLUMNS).createOrReplaceTempView("cols")
        tree = self.tree(self.analyzed("SELECT * FROM cols"))
        self.columns = {
            json.dumps(type_of(node)): node.fields["name"] for node in tree.kids("projectList")
        }

    def analyzed(self, text: str) -> Any:
        try:
            return self.session._jsparkSession.sql(text).queryExecution().analyzed()
        except (PySparkException, Py4JJavaError) as error:
            raise RefusedBySpark(str(error)[:300]) from None

    def tree(self, plan: Any) -> TreeNode:
        dumped = self.dump.dump(plan, CHARACTERS_MAX)
        return parse_tree(dumped, nodes_max=100_000, depth_max=5_000)

    def written(self, tree: TreeNode) -> list[str]:
        """Return the text of each expression of a SELECT."""
        kinds = {node.name for node in walk(tree)}
        if "Expand" in kinds or ("Window" not in kinds and has_nested_project(tree)):
            raise RefusedBySpark("no plain SELECT")
        names: dict[int, str] = {}
        for node in walk(tree):
            for output in node.fields.get("output") or ():
                names[output.fields["exprId"]] = quote(output.fields["name"])
        writer = ExpressionWriter(
            self.functions, names.__getitem__, ansi=self.ansi, raw_strings=self.raw
        )
        # What is computed below the root is written where it is used.
        for node in reversed(list(walk(tree))):
            if node is not tree and node.name in ("Project", "Window"):
                listed = node.kids("projectList") + node.kids("windowExpressions")
                for alias in listed:
                    names.setdefault(alias.fields["exprId"], writer.write(alias))
        texts = [writer.write(expression) for expression in expressions_of(tree)]
        if any(node.name == "Generate" and node.fields["outer"] for node in walk(tree)):
            texts = [text.replace("(", "_outer(", 1) for text in texts]
        return texts

    def difference(self, plan: Any, texts: Sequence[str], behind: str) -> str:
        # Without names: a generator makes several columns.
        try:
            again = self.analyzed(f"SELECT {', '.join(texts)} {behind}")
        except RefusedBySpark as refused:
            return str(refused)
        try:
            return str(self.inspector.difference(plan, again))
        except (PySparkException, Py4JJavaError) as error:
            raise RefusedBySpark(f"computing constants: {str(error)[:200]}") from None

    def check(self, select: str, behind: str) -> str:
        """Return "" for one that is rendered, "-reason" for one that is not, else "!difference";
        "?error" for one that Spark refuses, "~" for what the clock or chance decides."""
        try:
            plan = self.analyzed(f"SELECT {select} {behind}")
            tree = self.tree(plan)
            if not is_steady(tree):
                return "~"
            texts = self.written(tree)
            found = self.difference(plan, texts, behind)
            if found and self.difference(plan, [select], behind):
                # It differs from itself: it draws at random, or has arrays for constants.
                return "~"
        except NotRendered as refused:
            return f"-{refused}"
        except (KeyError, RefusedBySpark) as error:
            # Or over columns that are no table's.
            return f"?{str(error)[:150]}"
        return f"!{found} <<< {texts}" if found else ""

    def substituted(self, select: str, below: str) -> str:
        """Check an expression after rules have put in what its columns are made of."""
        jvm = self.session._jvm
        assert jvm is not None
        catalyst = jvm.org.apache.spark.sql.catalyst
        plan = self.analyzed(f"SELECT {select} FROM (SELECT {below} FROM cols)")
        plan = catalyst.analysis.EliminateSubqueryAliases.apply(plan)
        plan = catalyst.optimizer.CollapseProject.apply(plan, True)
        try:
            texts = self.written(self.tree(plan))
        except (NotRendered, KeyError) as refused:
            return f"-{refused!r}"
        found = self.difference(plan, texts, "FROM cols")
        return f"!{found} <<< {texts}" if found else ""

    def check_all(self, selects: Sequence[str], behind: str) -> dict[str, str]:
        """Check many in one SELECT; halves where not all of them are rendered the same."""
        if not selects:
            return {}
        if len(selects) == 1:
            return {selects[0]: self.check(selects[0], behind)}
        listed = ", ".join(f"{select} AS x{at}" for at, select in enumerate(selects))
        if self.check(listed, behind) == "":
            return dict.fromkeys(selects, "")
        half = len(selects) // 2
        return {
            **self.check_all(selects[:half], behind),
            **self.check_all(selects[half:], behind),
        }

    def over_columns(self, expression: TreeNode) -> list[str]:
        """Return texts of an expression with columns in the place of its literals."""
        names: dict[int, str] = {}
        columns = self.columns

        def replaced(node: TreeNode, which: int | None, seen: list[int]) -> TreeNode:
            if node.name == "Literal":
                column = columns.get(json.dumps(type_of(node)))
                seen.append(1)
                if column is None or (which is not None and len(seen) - 1 != which):
                    return node
                identity = 10_000_000 + len(names)
                names[identity] = column
                return TreeNode("x.AttributeReference", {"exprId": identity})
            return node.replaced([replaced(child, which, seen) for child in node.children])

        writer = ExpressionWriter(self.functions, names.__getitem__, ansi=self.ansi)
        literals = sum(node.name == "Literal" for node in walk(expression))
        found = []
        for which in (0, None) if literals > 1 else (None,):
            # What has a literal of one kind only is not rendered with a column instead.
            with suppress(NotRendered):
                found.append(writer.write(replaced(expression, which, [])))
        return found[:1]


def is_steady(tree: TreeNode) -> bool:
    """Return whether neither chance nor a clock is in a SELECT."""
    return not any(
        node.fields.get("volatile") or node.name in CLOCKS
        for field in tree.kids("projectList")
        for node in walk(field)
    )


def has_nested_project(tree: TreeNode) -> bool:
    """Return whether one SELECT computes what another one computes with."""
    return any(node.name == "Project" for node in walk(tree) if node is not tree)


def expressions_of(tree: TreeNode) -> list[TreeNode]:
    """Return what a SELECT computes: its generator where it has one."""
    for node in walk(tree):
        if node.name == "Generate":
            generator = node.kid("generator")
            return [] if generator is None else [generator]
    if tree.name == "Aggregate":
        return tree.kids("aggregateExpressions")
    if tree.name != "Project":
        raise RefusedBySpark(f"a {tree.name} is no plain SELECT")
    return tree.kids("projectList")


def in_sample(name: str, one_in: int) -> bool:
    """Return whether a name is in a sample that is the same in every run."""
    return zlib.crc32(name.encode()) % one_in == 0


def function_infos(lab: ExpressionLab) -> dict[str, str]:
    """Return, by function, the examples in its documentation."""
    registry = lab.session._jsparkSession.sessionState().functionRegistry()
    found = {}
    names = registry.listFunction().iterator()
    while names.hasNext():
        info = registry.lookupFunction(names.next()).get()
        found[info.getName()] = info.getExamples() + "\n"
    return found


def queries_in(text: str) -> list[str]:
    """Return the first queries in a function's examples."""
    return re.findall(r"> SELECT (.*?);\n", text, re.DOTALL)[:EXAMPLES]


def split(listed: str) -> tuple[str, str]:
    """Return what a SELECT lists, and the rest from its FROM on."""
    found = BEHIND.search(listed)
    return (listed, "") if found is None else (listed[: found.start()], listed[found.start() :])


def batched(lab: ExpressionLab, selects: Sequence[str], behind: str) -> dict[str, str]:
    """Check any number of expressions, a batch in a SELECT."""
    outcomes: dict[str, str] = {}
    for start in range(0, len(selects), BATCH):
        outcomes.update(lab.check_all(selects[start : start + BATCH], behind))
    return outcomes


def expressions_by_select(
    lab: ExpressionLab, selects: Sequence[str]
) -> Iterator[tuple[str, TreeNode]]:
    """Yield the expressions of many SELECTs, a batch in one where that has one of each."""
    for start in range(0, len(selects), BATCH):
        batch = selects[start : start + BATCH]
        with suppress(RefusedBySpark):
            found = expressions_of(lab.tree(lab.analyzed(f"SELECT {', '.join(batch)}")))
            if len(found) == len(batch):
                yield from zip(batch, found, strict=True)
                continue
        for select in batch:
            for expression in expressions_of(lab.tree(lab.analyzed(f"SELECT {select}"))):
                yield select, expression


def documented(
    lab: ExpressionLab, infos: Mapping[str, str], one_in: int
) -> dict[str, dict[str, str]]:
    """Return, by function of the sample, the outcomes of its examples and of these over columns."""
    examples = {n: queries_in(text) for n, text in infos.items() if in_sample(n, one_in)}
    outcomes: dict[str, dict[str, str]] = {name: {} for name in examples}
    plain: dict[str, list[str]] = {}
    for name, queries in examples.items():
        for query in queries:
            listed, behind = split(query)
            if behind and outcomes[name]:
                continue
            if behind:
                outcomes[name][query] = lab.check(listed, behind)
            else:
                plain.setdefault(listed, []).append(name)
    over: dict[str, list[str]] = {}
    checked = batched(lab, list(plain), "")
    for listed, outcome in checked.items():
        for name in plain[listed]:
            outcomes[name][listed] = outcome
    passed = [listed for listed, outcome in checked.items() if outcome == ""]
    for listed, expression in expressions_by_select(lab, passed):
        over.update(dict.fromkeys(lab.over_columns(expression), plain[listed]))
    for text, outcome in batched(lab, list(over), "FROM cols").items():
        for name in over[text]:
            outcomes[name][text] = outcome
    return outcomes


def main() -> None:
    """Reads what to do, and prints what came of it."""
    wanted = json.loads(Path(sys.argv[1]).read_text())
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", archive_options(wanted["archive"]))
        .config("spark.log.level", "OFF")
        .config("spark.sql.timeType.enabled", "true")
        .config("spark.sql.session.timeZone", "Europe/Berlin")
        .getOrCreate()
    )
    logging.getLogger("SQLQueryContextLogger").disabled = True
    told: dict[str, Any] = {"listed": {}}
    for ansi in (True, False):
        lab = ExpressionLab(session, ansi=ansi)
        told["listed"][str(ansi)] = {
            **batched(lab, wanted["listed"][str(ansi)], "FROM cols"),
            **batched(lab, wanted["aggregates"], "FROM cols"),
        }
        if ansi:
            told["substituted"] = {
                text: lab.substituted(text, wanted["below"]) for text in wanted["substituted"]
            }
        if ansi:
            infos = function_infos(lab)
            told["names"] = sorted(infos)
            told["documented"] = documented(lab, infos, wanted["one_in"])
    lab = ExpressionLab(session, ansi=True, raw=True)
    told["raw"] = batched(lab, wanted["raw"], "FROM cols")
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
