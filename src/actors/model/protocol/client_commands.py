"""The command history of one client of a half, and the client that a worker serves. Pure.

A history is the shortest list of commands with the same result as all commands given. A controller
replays its history to a replica that connects. A worker collects the commands before
`InitializationComplete` in a history. A history is reduced when it has doubled in length since the
last reduction, so the cost is amortised and the length stays proportional to the state.
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
"""Number of clients to remember that disconnected before their Hello was sequenced."""
REDUCED_MIN: Final = 8
"""A history is only reduced once it has more than twice this many commands."""


class CommandHistory(Generic[C]):
    """The commands of one client, kept short. Subclasses define how to reduce them."""

    def __init__(self, commands: Iterable[C] = ()) -> None:
        self._commands: list[C] = []
        """The result of the last reduction, followed by the commands since then."""
        self._reduced_length = 0
        """Length of the history after the last reduction."""
        for command in commands:
            self.push(command)

    def _reduced(self, commands: list[C]) -> list[C]:
        """Return the shortest list with the same result."""
        raise NotImplementedError

    def push(self, command: C) -> None:
        """Append a command, and reduce the history if it has doubled since the last reduction."""
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
    """The client that one half of a worker serves."""

    def __init__(self) -> None:
        self.nonce: Nonce | None = None
        """Nonce of the latest client, also after it has disconnected; None before the first."""
        self.connected = False
        """True while that client is connected."""
        self.incoming: H | None = None
        """Its commands before `InitializationComplete`; None afterwards."""
        self._lost: OrderedDict[Nonce, None] = OrderedDict()
        """Clients that disconnected before their Hello was sequenced."""

    @property
    def muted(self) -> bool:
        """Return whether responses are withheld, because no client is connected or it is
        initializing."""
        return not self.connected or self.incoming is not None

    def begin(self, nonce: Nonce, incoming: H) -> Nonce | None:
        """Switch to the client that sent a Hello. Return its nonce, or None if it is gone
        already."""
        self.nonce = nonce
        # The client may have disconnected before its Hello was sequenced.
        self.connected = nonce not in self._lost
        self._lost.pop(nonce, None)
        self.incoming = incoming
        return nonce if self.connected else None

    def disconnect(self, nonce: Nonce) -> bool:
        """Record that a client disconnected: the current, a former or a future one.

        Returns whether it was the connected one.
        """
        if nonce != self.nonce:
            # Its Hello may still come and must not connect it.
            self._lost[nonce] = None
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)
            return False
        was_connected, self.connected = self.connected, False
        return was_connected


def merge_configuration(old: S | None, new: S) -> S:
    """Merge two configurations. A field that is None in the newer one keeps its old value."""
    if old is None:
        return new
    names = new.__struct_fields__
    said = {name: getattr(new, name) for name in names if getattr(new, name) is not None}
    return msgspec.structs.replace(old, **said)
