"""A view's text as it is written again, for Spark to compare with the view's own.

The rules work on the parser's tree, and the pieces of it that they put into steps are written
out anew. Both are right only if the tree is Spark's: the same functions with the same arguments,
operators bound as Spark binds them. So the whole tree is written in two ways, and Spark's plan of
either must be its plan of the original (`actors.spark.analysis`):

- as pieces are written, which shows that nothing is lost or renamed in writing;
- with every operand in parentheses, which shows how the tree binds:

>>> import sqlglot
>>> tree = sqlglot.parse_one("SELECT a FROM t WHERE a = b < c", dialect=DIALECT)
>>> renditions(tree)[1]
'SELECT a FROM t WHERE a = (b < c)'

Spark reads the original as ``(a = b) < c``. Where both hold, any subtree written by itself means
what it means in the original: the tokens and their binding are the original's.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from actors.views.parse import DIALECT, Tree
from actors.views.trees import text

__all__ = ["DIALECT", "renditions"]

_OPERATORS: Final = (
    exp.Binary,
    exp.Unary,
    exp.Between,
    exp.In,
    exp.Interval,
)
_DELIMITED: Final = (exp.Paren, exp.Dot, exp.PropertyEQ, exp.Kwarg, exp.Slice)
_INFIX_FUNCTIONS: Final = (exp.Connector, exp.RegexpLike)


def renditions(tree: Tree) -> tuple[str, ...]:
    """Return the query of a syntax tree as text: plain, and with its operands in parentheses."""
    return tuple(dict.fromkeys((text(tree), text(_parenthesised(tree)))))


def _parenthesised(tree: Tree) -> Tree:
    """Return a copy in which each operator that is an operand stands in parentheses.

    A left operand of its own kind needs none: all of Spark's operators bind to the left, so that
    ``a - b - c`` is one way to write ``(a - b) - c``, and long chains do not nest.
    """
    made = tree.copy()
    for node in reversed(list(made.walk(bfs=False))):
        parent = node.parent
        if parent is None or not _is_operator(node) or not _takes_operand(parent, node.arg_key):
            continue
        if node.arg_key == "this" and type(node) is type(parent) and isinstance(node, exp.Binary):
            continue
        around = exp.Paren()
        node.replace(around)
        around.set("this", node)
    return made


def _is_operator(node: Tree) -> bool:
    if isinstance(node, exp.Func) and not isinstance(node, _INFIX_FUNCTIONS):
        return False
    return isinstance(node, _OPERATORS) and not isinstance(node, _DELIMITED)


def _takes_operand(parent: Tree, place: str) -> bool:
    if isinstance(parent, exp.Dot | exp.Bracket):
        return place == "this"
    if isinstance(parent, exp.In):
        return place in ("this", "expressions")
    # ``a LIKE b ESCAPE c`` is one operator of three operands, and an interval is a literal.
    return _is_operator(parent) and not isinstance(parent, exp.Escape | exp.Interval)
