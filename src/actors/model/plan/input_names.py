"""Names of the inputs of a delta plan: a letter for the kind and a number, as in ``d0``.

Plans, jobs and files contain the names as text. Code composes and parses them with the types here.
`actors.model.plan.delta` says which rows each kind of input has.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from actors.runtime.errors import InvalidUsage

_NAMES_KNOWN_MAX: Final = 4096
"""Number of parsed names to cache. It is bounded, because a foreign job may contain any texts."""


# A letter and a number, because the names are also prefixes of columns and names in Spark SQL.
class InputKind(StrEnum):
    """The kinds of inputs of a delta plan, by their letters."""

    CHANGES = "d"
    """The changes of an import in the step's interval; numbered like imports."""
    STATE = "s"
    """The rows of an import before the step that its changes can touch; numbered like imports."""
    HIDDEN = "h"
    """The touched rows of a hidden state before the step; numbered like hidden states."""
    RESULT = "r"
    """The output of a stratum of the same step; numbered like strata."""
    DUE = "c"
    """The rows of a hidden state that come due in the step; numbered like hidden states."""
    NEARBY = "n"
    """The rows of an import's state that are near changes; numbered like `DeltaPlan.nearby`."""
    COVERED = "k"
    """The changes of an import up to the edges of their groups; numbered like
    `DeltaPlan.covered`."""
    INTERVAL = "i"
    """The single row with the step's interval; its number is 0."""

    def text(self, number: int) -> str:
        """Return the name of an input of this kind.

        >>> InputKind.CHANGES.text(12)
        'd12'
        """
        return f"{self}{number}"


# Tuples and not sets, because `in` compares by identity, while an enum's hash runs Python code.
_CHANGES: Final = (InputKind.CHANGES, InputKind.RESULT, InputKind.DUE, InputKind.COVERED)
_STATE: Final = (InputKind.STATE, InputKind.HIDDEN, InputKind.NEARBY)
_LOOKED_UP: Final = (InputKind.STATE, InputKind.HIDDEN)
# The edges up to which changes are covered are looked up, so the changes wait for them.
_AFTER_LOOKUPS: Final = (*_LOOKED_UP, InputKind.COVERED)
_OF_HIDDEN_STATES: Final = (InputKind.HIDDEN, InputKind.DUE)


class InputName(NamedTuple):
    """The parsed name of an input.

    >>> InputName.parse("s3")
    InputName(kind=<InputKind.STATE: 's'>, number=3)
    >>> InputName.parse("s3").text
    's3'
    """

    kind: InputKind
    number: int

    @classmethod
    def parse(cls, text: str) -> InputName:
        """Parse a name. Raises `InvalidUsage` if the text is not the name of an input.

        >>> kind, number = InputName.parse("k10")
        >>> kind.name, number
        ('COVERED', 10)
        >>> InputName.parse("orders")
        Traceback (most recent call last):
        actors.runtime.errors.InvalidUsage: a plan has no input 'orders'
        """
        found = _parsed(text)
        if found is None:
            raise InvalidUsage(f"a plan has no input {text!r}")
        return found

    @classmethod
    def find(cls, text: str) -> InputName | None:
        """Parse a name; None if the text is not the name of an input.

        >>> [InputName.find(text) for text in ("", "d", "x0", "d00", "d0_k")]
        [None, None, None, None, None]
        """
        return _parsed(text)

    @property
    def text(self) -> str:
        """Return the name as plans, jobs and files contain it."""
        return self.kind.text(self.number)

    @property
    def holds_changes(self) -> bool:
        """Return whether the rows are changes in the step.

        >>> [kind.value for kind in InputKind if InputName(kind, 0).holds_changes]
        ['d', 'r', 'c', 'k']
        """
        return self.kind in _CHANGES

    @property
    def holds_state(self) -> bool:
        """Return whether the rows are state before the step.

        >>> [kind.value for kind in InputKind if InputName(kind, 0).holds_state]
        ['s', 'h', 'n']
        """
        return self.kind in _STATE

    @property
    def is_looked_up(self) -> bool:
        """Return whether lookups fill the input, so that it may be the target of one.

        >>> [kind.value for kind in InputKind if InputName(kind, 0).is_looked_up]
        ['s', 'h']
        """
        return self.kind in _LOOKED_UP

    @property
    def follows_lookups(self) -> bool:
        """Return whether the rows are known only after lookups, of the input or of its edges.

        >>> [kind.value for kind in InputKind if InputName(kind, 0).follows_lookups]
        ['s', 'h', 'k']
        """
        return self.kind in _AFTER_LOOKUPS

    @property
    def is_of_hidden_state(self) -> bool:
        """Return whether the rows have the columns of the hidden state with the name's number.

        >>> [kind.value for kind in InputKind if InputName(kind, 0).is_of_hidden_state]
        ['h', 'c']
        """
        return self.kind in _OF_HIDDEN_STATES


# At most nine digits, because `int` raises another error for thousands of digits.
_NAME: Final = re.compile(f"([{''.join(InputKind)}])(0|[1-9][0-9]{{0,8}})")


# Bounded, because a foreign job may name anything.
@lru_cache(maxsize=_NAMES_KNOWN_MAX)
def _parsed(text: str) -> InputName | None:
    found = _NAME.fullmatch(text)
    return None if found is None else InputName(InputKind(found[1]), int(found[2]))
