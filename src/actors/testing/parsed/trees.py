"""Expressions as syntax trees: reading, comparing, rewriting, and checking that they are scalar.

`SCALAR` lists the constructs whose text survives parsing and generating unchanged. Functions that
the parser does not know stay verbatim, and Spark says whether they are scalar
(`build.probe_texts`). `UnsupportedConstruct` names a construct without a rule: the view is then
opaque.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import sqlglot
from sqlglot import exp

from actors.engine.views.operators import UnsupportedConstruct as UnsupportedConstruct
from actors.model.plan.schema import quote as quote
from actors.testing.parsed.parse import DIALECT, Tree

_SCALAR_WORDS: Final = """
Column Identifier Dot Literal RawString HexString Boolean Null Cast TryCast DataType
DataTypeParam Paren And Or Not EQ NEQ GT GTE LT LTE NullSafeEQ NullSafeNEQ Is In Between
Like ILike RegexpLike Escape Add Sub Mul Div IntDiv Mod Neg BitwiseAnd BitwiseOr BitwiseXor
BitwiseNot Case If Coalesce Nullif Nvl2 Greatest Least Upper Lower Length Concat ConcatWs
DPipe Substring Left Right Trim Pad Replace Repeat Reverse Translate Ascii StartsWith
EndsWith Contains Initcap StrPosition RegexpReplace RegexpExtract RegexpSplit Abs Round Ceil
Floor Sqrt Exp Pow Sign Year Month Day DayOfMonth DayOfWeek DayOfYear WeekOfYear Quarter
Hour Minute Second TsOrDsToDate TimestampTrunc DateTrunc Extract Var Interval TsOrDsAdd
DateDiff AddMonths LastDay TimestampDiff Bracket ArraySize ArrayContains Array MD5 SHA2
SafeDivide IntervalSpan TimestampAdd Chr Decode DecodeCase Overlay Struct PropertyEQ Anonymous
"""
SCALAR: Final = frozenset(_SCALAR_WORDS.split())


def column_id(prefix: str, name: str, names: tuple[str, ...]) -> str:
    """Return the id of column `name` of a table with columns `names`: a word that needs no
    quotes."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    # Columns whose names differ only in punctuation must not share an id.
    return f"{prefix}_{plain}" + ("" if plain == name else f"_{names.index(name)}")


def text(tree: Tree) -> str:
    """Return the Spark SQL text of an expression."""
    return str(tree.sql(dialect=DIALECT))


def ids(tree: Tree) -> set[str]:
    """Return the column ids that an expression reads; for ``i0_s.field`` that is ``i0_s``."""
    return {column.parts[0].name for column in tree.find_all(exp.Column)}


@lru_cache(maxsize=8192)
def tree_of(written: str) -> Tree:
    """Return the tree of an expression's text. It is cached, so do not change it."""
    return sqlglot.parse_one(written, dialect=DIALECT)


@lru_cache(maxsize=8192)
def reads(written: str | None) -> frozenset[str]:
    """Return the column ids that an expression's text reads; none for None."""
    return frozenset() if written is None else frozenset(ids(tree_of(written)))


def bare(tree: Tree) -> str:
    """Return the text by which expressions are compared: without outer parentheses."""
    return text(tree.unnest())


_TURNS: Final = (exp.Add, exp.Mul, exp.And, exp.Or, exp.EQ, exp.NullSafeEQ, exp.BitwiseAnd)


def canonical_text(tree: Tree) -> str:
    """Return the text by which Spark compares expressions: with commutative operands in a fixed
    order (``b + a`` is ``a + b``)."""

    def sides(node: Tree) -> Tree:
        if isinstance(node, _TURNS) and text(node.right) < text(node.left):
            left, right = node.left.copy(), node.right.copy()
            node.set("this", right)
            node.set("expression", left)
        return node

    # Children first: the order of operands follows from their own texts.
    nodes = list(tree.copy().unnest().dfs())
    for node in reversed(nodes):
        sides(node)
    return text(nodes[0])


def conjuncts_of(tree: Tree) -> list[Tree]:
    """Return the conjuncts of a predicate."""
    tree = tree.unnest()
    if isinstance(tree, exp.And):
        return [*conjuncts_of(tree.left), *conjuncts_of(tree.right)]
    return [tree]


def factored(tree: Tree) -> list[Tree]:
    """Return the conjuncts of a predicate, with those that all branches of an OR share pulled out.

    ``(a AND b) OR (a AND c)`` is ``a AND (b OR c)``, in three-valued logic too.
    """
    found: list[Tree] = []
    for part in conjuncts_of(tree):
        found += _pulled_out(part) if isinstance(part, exp.Or) else [part]
    return found


def _pulled_out(tree: Tree) -> list[Tree]:
    branches = [factored(branch) for branch in _disjuncts(tree)]
    written = [{_same(part) for part in branch} for branch in branches]
    shared = set.intersection(*written)
    if not shared:
        return [tree]
    pulled: dict[str, Tree] = {}
    for part in branches[0]:
        if _same(part) in shared:
            pulled.setdefault(_same(part), part)
    rests = [[part for part in branch if _same(part) not in shared] for branch in branches]
    if any(not rest for rest in rests):
        return list(pulled.values())
    return [*pulled.values(), exp.or_(*(exp.and_(*rest) for rest in rests), copy=True)]


def _same(tree: Tree) -> str:
    """Return a text that is the same for an equality and its mirror image."""
    if isinstance(tree, exp.EQ | exp.NullSafeEQ):
        sides = sorted((bare(tree.left), bare(tree.right)))
        return f"{sides[0]} {tree.key} {sides[1]}"
    return bare(tree)


def _disjuncts(tree: Tree) -> list[Tree]:
    tree = tree.unnest()
    if isinstance(tree, exp.Or):
        return [*_disjuncts(tree.left), *_disjuncts(tree.right)]
    return [tree]


def all_of(trees: list[Tree]) -> tuple[str, ...]:
    """Return the texts of predicates."""
    return tuple(text(tree) for tree in trees)


def transform(tree: Tree, replace: Callable[[Tree], Tree | None]) -> Tree:
    """Return a top-down copy. A node that `replace` returns is inserted unchanged."""
    done = replace(tree)
    if done is not None:
        return done

    def below(value: Any) -> Any:
        if isinstance(value, list):
            return [below(item) for item in value]
        if isinstance(value, exp.Expression):
            return transform(value, replace)
        return value.copy() if isinstance(value, exp.Expr) else value

    # Not `tree.copy()`, which would copy the whole subtree again at each level.
    made = type(tree)(**{key: below(value) for key, value in tree.args.items()})
    made.comments, made._meta = tree.comments, tree._meta
    return made


def substituted(tree: Tree, expressions: Mapping[str, str]) -> Tree:
    """Return a copy in which columns are replaced by the expressions that make them.

    Raises `UnsupportedConstruct` for an expression whose text does not survive parsing.
    """

    def replace(node: Tree) -> Tree | None:
        if isinstance(node, exp.Column) and node.parts[0].name in expressions:
            written = expressions[node.parts[0].name]
            made = tree_of(written)
            if text(made) != written:
                raise UnsupportedConstruct(f"{written}, which is parsed as {text(made)}")
            return _with_fields(made, node.parts[1:])
        return None

    return transform(tree, replace)


def _with_fields(tree: Tree, fields: list[Tree]) -> Tree:
    made = (
        tree.copy() if isinstance(tree, exp.Column | exp.Literal) else exp.Paren(this=tree.copy())
    )
    for field in fields:
        made = exp.Dot(this=made, expression=field.copy())
    return made


def operand(tree: Tree) -> Tree:
    """Return a copy that can be an operand of any operator."""
    return tree.copy() if isinstance(tree, exp.Column) else exp.Paren(this=tree.copy())


def check_scalar(tree: Tree) -> None:
    """Accept an expression that depends only on a row. Raises `UnsupportedConstruct` naming the
    construct."""
    for node in tree.walk():
        kind = type(node).__name__
        if isinstance(node, exp.Window):
            raise UnsupportedConstruct("a window function")
        if isinstance(node, exp.AggFunc):
            raise UnsupportedConstruct(f"the nested aggregate {text(node)}")
        if kind not in SCALAR:
            raise UnsupportedConstruct(f"the construct {kind} ({text(node)[:80]})")


def check_args(tree: Tree, known: set[str], what: str) -> None:
    """Accept a node that has only the parts in `known`. Raises `UnsupportedConstruct` naming the
    others."""
    for key in present(tree):
        if key not in known:
            raise UnsupportedConstruct(f"{key.rstrip('_').upper()} on {what}")


def present(tree: Tree) -> list[str]:
    """Return the names of the parts that a node has."""
    return [key for key, value in tree.args.items() if value]
