"""Mutants: each leaves out one rule of the code under simulation, by patching.

A simulator keeps its mutants in a `Mutants`. They prove the simulation: each must be found in few
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias
from unittest import mock

Mutant: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes the context manager that plants a bug for as long as it lasts."""


class Mutants(dict[str, Mutant]):
    """The mutants of one simulator, by name. Each method is a decorator that adds one."""

    def planted(self, plant: Callable[[], Iterator[None]]) -> Mutant:
        """Add a mutant whose generator plants the bug, yields, and removes the bug."""
        made = self[plant.__name__] = contextmanager(plant)
        return made

    def replaces(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Mutant]:
        """Add a mutant in which the decorated function stands for `owner.name`."""

        def add(wrong: Callable[..., Any]) -> Mutant:
            def plant() -> Iterator[None]:
                with mock.patch.object(owner, name, wrong):
                    yield

            plant.__name__ = wrong.__name__
            return self.planted(plant)

        return add

    def wraps(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Mutant]:
        """As `replaces`; the decorated function takes the original as its first argument."""

        def add(wrong: Callable[..., Any]) -> Mutant:
            def plant() -> Iterator[None]:
                right = getattr(owner, name)

                def wrapped(*args: Any, **options: Any) -> Any:
                    return wrong(right, *args, **options)

                with mock.patch.object(owner, name, wrapped):
                    yield

            plant.__name__ = wrong.__name__
            return self.planted(plant)

        return add
