"""The commands of one client of a half: their history, and the client that a worker serves.

A history is the shortest list of commands with the same result as all that were given. A controller
replays its own to a connecting replica, and a worker collects in one the commands before
`InitializationComplete`. It is reduced when it has doubled since the last reduction, so the cost is
amortised and the length stays proportional to the state. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

import msgspec

from actors.runtime.progress import Nonce

C = TypeVar("C")
H = TypeVar("H")
S = TypeVar("S", bound=msgspec.Struct)

LOST_MAX: Final = 1024
"""Number of clients remembered that disconnected before their Hello: as many as nonces."""
REDUCED_MIN: Final = 8
"""A history shorter than twice as many commands is not worth a reduction."""


class CommandHistory(Generic[C]):
    """Commands of one client, kept short. Subclasses say how a list of them is reduced."""

    def __init__(self, commands: Iterable[C] = ()) -> None:
        self._commands: list[C] = []
        self._reduced_length = 0
        for command in commands:
            self.push(command)

    def _reduced(self, commands: list[C]) -> list[C]:
        """Return the shortest list with the same result."""
        raise NotImplementedError

    def push(self, command: C) -> None:
        """Append a command; reduce when the list has doubled."""
        self._commands.append(command)
        if len(self._commands) > 2 * max(self._reduced_length, REDUCED_MIN):
            self.reduce()

    def reduce(self) -> None:
        """Reduce the history to its shortest equivalent."""
        self._commands = self._reduced(self._commands)
        self._reduced_length = len(self._commands)

    def commands(self) -> list[C]:
        """Return the commands to replay, in order."""
        return list(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


class HalfClient(Generic[H]):
    """The client that a half of a worker serves; `incoming` has its commands before
    InitializationComplete."""

    def __init__(self) -> None:
        self.nonce: Nonce | None = None
        self.connected = False
        self.incoming: H | None = None
        self._lost: OrderedDict[Nonce, None] = OrderedDict()

    @property
    def muted(self) -> bool:
        """Return whether responses are withheld: no client is connected, or it is initializing."""
        return not self.connected or self.incoming is not None

    def begin(self, nonce: Nonce, incoming: H) -> Nonce | None:
        """Switch to the client of a Hello; return its nonce, or None if it is gone already."""
        self.nonce = nonce
        # The client may have disconnected before its Hello was sequenced.
        self.connected = nonce not in self._lost
        self._lost.pop(nonce, None)
        self.incoming = incoming
        return nonce if self.connected else None

    def disconnect(self, nonce: Nonce) -> bool:
        """Note that the current, a former or a future client disconnected; return whether it was
        the one that is served."""
        if nonce != self.nonce:
            # Its Hello may still come, and must not connect it.
            self._lost[nonce] = None
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)
            return False
        was_connected, self.connected = self.connected, False
        return was_connected


def merge_configuration(old: S | None, new: S) -> S:
    """Return both configurations merged, the newer one winning; an unset field is unchanged."""
    if old is None:
        return new
    names = new.__struct_fields__
    said = {name: getattr(new, name) for name in names if getattr(new, name) is not None}
    return msgspec.structs.replace(old, **said)
