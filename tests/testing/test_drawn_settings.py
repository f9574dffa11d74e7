"""Drawn settings and constants are right, replay by their seed, and reach every threshold."""

from __future__ import annotations

import operator

import actors
from actors.model.plan import updates
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import THRESHOLDS, SettingThreshold
from actors.testing.drawn_settings import (
    SMALL_CONSTANTS,
    SMALL_VALUES,
    constants_of,
    draw_constants,
    draw_settings,
    drawn_text,
    restore_constants,
    use_constants,
)

SEEDS = range(200)
FEW_ROWS = "model.plan.updates.FEW_ROWS"


def test_every_threshold_is_drawn() -> None:
    settings = {each.setting for each in THRESHOLDS if isinstance(each, SettingThreshold)}
    assert settings <= set(SMALL_VALUES)


def test_draws_are_small_or_the_default_and_hold_together() -> None:
    base = Settings()
    drawn = [draw_settings(seed, base) for seed in SEEDS]
    for made in drawn:
        made.check()
    for name, values in SMALL_VALUES.items():
        seen = {getattr(made, name) for made in drawn}
        assert seen == {getattr(base, name), *values}, name


def test_a_seed_draws_the_same_again() -> None:
    base = Settings(workers=1)
    assert draw_settings("a", base) == draw_settings("a", base)
    assert draw_settings("a", base) != draw_settings("b", base)
    assert draw_settings("a", base).workers == 1
    assert draw_constants("a") == draw_constants("a")
    assert draw_constants("a") != draw_constants("b")


def test_what_is_kept_is_not_drawn() -> None:
    base = Settings()
    for seed in SEEDS:
        made = draw_settings(seed, base, SMALL_VALUES)
        assert made == base
        assert drawn_text(base, made) == "all defaults"


def test_the_text_names_what_was_drawn() -> None:
    made = Settings(lookup_rows_max=1, step_pairs_max=20)
    assert drawn_text(Settings(), made) == "lookup_rows_max=1 step_pairs_max=20"


def test_constants_are_drawn_below_their_own_values() -> None:
    drawn = [draw_constants(seed) for seed in SEEDS]
    for name, values in SMALL_CONSTANTS.items():
        assert {made.get(name) for made in drawn} == {None, *values}, name
        with constants_of({name: values[0]}):
            assert operator.attrgetter(name)(actors) is values[0], name
        own = operator.attrgetter(name)(actors)
        assert all(type(value) is type(own) for value in values), name
        if isinstance(own, int):
            assert max(values) < own, name


def test_constants_hold_while_a_block_runs() -> None:
    own = updates.FEW_ROWS
    with constants_of({FEW_ROWS: 3}):
        assert updates.FEW_ROWS == 3
    assert own == updates.FEW_ROWS
    use_constants({FEW_ROWS: 3})
    use_constants({})
    assert own == updates.FEW_ROWS
    use_constants({FEW_ROWS: 3})
    restore_constants()
    assert own == updates.FEW_ROWS
