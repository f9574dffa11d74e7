"""Makes a query's relational plan from Spark's own analysis of it.

Inside the JVM, the rules of `catalyst.optimizer_rules` are applied to the analysed plan, which is
then dumped in one call and becomes a relational plan (`catalyst.relations`). That plan is written
as SQL again, analysed, and put through the same rules. Both plans must have the same canonical
form; otherwise the translation is refused with the first line that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame

from actors.engine.catalyst.function_calls import FunctionNames
from actors.engine.catalyst.optimizer_rules import ONCE, REPEATED, rule_names
from actors.engine.catalyst.plan_nodes import NotTranslated
from actors.engine.catalyst.plan_tree import PlanTreeRejected, parse_tree
from actors.engine.catalyst.relations import RelationalBuilder
from actors.engine.spark.failures import is_gone, short_text
from actors.engine.spark.java import java_object
from actors.engine.spark.spark_releases import adapt_source, installed_version, newest_names
from actors.model.plan.jobs import QueryTranslation
from actors.model.plan.relational import ProjectNode
from actors.model.plan.relational_text import render
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import QueryRejected

if TYPE_CHECKING:
    from actors.engine.spark.bridge import ClassicBridge

NODE_CHARACTERS: Final = 1_000
"""Maximum size of a dump: the average number of characters per node."""


def function_names(gateway: Any, engine: Any) -> FunctionNames:
    """Return the functions that a session (the JVM's own) knows, by the classes of their
    expressions. Asks the JVM in a single call."""
    return FunctionNames(java_object(gateway, "PlanDump").functionNames(engine))


class CatalystFront:
    """Translates the analysed queries of one session."""

    def __init__(self, bridge: ClassicBridge) -> None:
        self._bridge = bridge
        gateway = bridge.session._sc._gateway
        self._constructs = bridge.java("ConstructRewriter")
        self._rewriter = bridge.java("PlanRewriter")
        self._dump = bridge.java("PlanDump")
        self._functions: FunctionNames = function_names(gateway, bridge.engine)
        self._once, self._repeated = (
            adapt_source(rule_names(rules), installed_version()) for rules in (ONCE, REPEATED)
        )

    def translate(
        self, found: DataFrame, tables: Mapping[int, tuple[str, TableSchema]], nodes_max: int
    ) -> QueryTranslation:
        """Return a query's relational plan, or the reason why there is none. `tables`: the tables
        by number, in the order of the plan's inputs. A plan of more than `nodes_max` nodes is
        refused."""
        try:
            rewritten = self._rewritten(found)
            root = self._built(rewritten, found, tables, nodes_max)
        except (NotTranslated, PlanTreeRejected, RecursionError) as error:
            return QueryTranslation(None, str(error) or "the query is nested too deeply")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # A plan of an unexpected form must not reject the view: the view is recomputed instead.
            return QueryTranslation(None, f"its plan has an unexpected form ({error!r})")
        # An error in the translation leads to a view that is recomputed, not to one that is wrong.
        difference = self._difference(rewritten, found, root, [name for name, _ in tables.values()])
        if difference:
            return QueryTranslation(None, f"its translation does not match the query: {difference}")
        return QueryTranslation(root)

    def _rewritten(self, found: DataFrame) -> Any:
        plan = found._jdf.queryExecution().analyzed()
        try:
            return self._rewriter.rewrite(
                self._constructs.rewrite(plan), self._once, self._repeated
            )
        except Exception as error:
            # A dead JVM says nothing about the plan: the job fails and is run again.
            if is_gone(error):
                raise
            raise NotTranslated(
                f"the optimizer rules fail on it: {short_text(str(error))}"
            ) from None

    def _built(
        self,
        rewritten: Any,
        found: DataFrame,
        tables: Mapping[int, tuple[str, TableSchema]],
        nodes_max: int,
    ) -> ProjectNode:
        try:
            dumped = self._dump.dump(rewritten, nodes_max * NODE_CHARACTERS)
        except Exception as error:
            if is_gone(error):
                raise
            raise NotTranslated(f"its plan cannot be read: {short_text(str(error))}") from None
        dumped = newest_names(dumped, installed_version())
        tree = parse_tree(dumped, nodes_max=nodes_max, depth_max=nodes_max)
        ansi = self._bridge.session.conf.get("spark.sql.ansi.enabled") == "true"
        columns = {number: schema.names for number, (_, schema) in tables.items()}
        names = [field.name for field in found.schema.fields]
        zone = self._bridge.session.conf.get("spark.sql.session.timeZone")
        builder = RelationalBuilder(self._functions, columns, ansi=ansi, zone=zone)
        return builder.build(tree, names)

    def _difference(
        self, rewritten: Any, found: DataFrame, root: ProjectNode, tables: Sequence[str]
    ) -> str:
        """Return the first difference between the query's plan and that of `root` written as SQL;
        "" if there is none."""
        text = render(root, tuple(tables))
        try:
            again = self._bridge.query(text)
        except QueryRejected as error:
            return str(error)
        except Exception as error:
            if is_gone(error):
                raise
            return f"Spark rejects the translated query: {short_text(str(error))}"
        wanted, made = (
            [field.dataType.simpleString() for field in each.schema.fields]
            for each in (found, again)
        )
        if wanted != made:
            return f"its columns are {', '.join(made)} instead of {', '.join(wanted)}"
        normalizer, inspector = map(self._bridge.java, ("PlanNormalizer", "PlanInspector"))
        try:
            mine, theirs = (
                normalizer.normalForm(plan) for plan in (rewritten, self._rewritten(again))
            )
            return str(inspector.difference(mine, theirs))
        except Exception as error:
            if is_gone(error):
                raise
            return f"it has no normal form: {short_text(str(error))}"
