"""Drawn settings are right, replay by their seed, and reach every threshold."""

from __future__ import annotations

from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import FEW_ROWS, KERNEL_LIMITS, THRESHOLDS, SettingThreshold
from actors.testing.drawn_settings import (
    LEAST_LIMITS,
    SMALL_VALUES,
    draw_settings,
    drawn_text,
    kernel_limits_of,
    small_limits,
)

SEEDS = range(200)


def test_every_threshold_is_drawn() -> None:
    settings = {each.setting for each in THRESHOLDS if isinstance(each, SettingThreshold)}
    assert settings <= set(SMALL_VALUES)
    assert set(LEAST_LIMITS) <= set(KERNEL_LIMITS)
    for name in KERNEL_LIMITS:
        assert small_limits(name)[0] < KERNEL_LIMITS[name].default, name


def test_draws_are_small_or_the_default_and_hold_together() -> None:
    base = Settings()
    drawn = [draw_settings(seed, base) for seed in SEEDS]
    for made in drawn:
        made.check()
    for name, values in SMALL_VALUES.items():
        seen = {getattr(made, name) for made in drawn}
        assert seen == {getattr(base, name), *values}, name
    for name in KERNEL_LIMITS:
        seen = {made.kernel_limits.get(name) for made in drawn}
        assert seen == {None, *small_limits(name)}, name


def test_a_seed_draws_the_same_again() -> None:
    base = Settings(workers=1)
    assert draw_settings("a", base) == draw_settings("a", base)
    assert draw_settings("a", base) != draw_settings("b", base)
    assert draw_settings("a", base).workers == 1


def test_what_is_kept_is_not_drawn() -> None:
    base = Settings()
    for seed in SEEDS:
        made = draw_settings(seed, base, SMALL_VALUES, limits=False)
        assert made == base
        assert drawn_text(base, made) == "all as by default"


def test_the_text_names_what_was_drawn() -> None:
    base = Settings()
    made = Settings(lookup_rows_max=1, kernel_limits={"updates_few_rows": 8})
    assert drawn_text(base, made) == "lookup_rows_max=1 kernel_limits.updates_few_rows=8"


def test_kernel_limits_hold_while_a_block_runs() -> None:
    default = FEW_ROWS.limit
    with kernel_limits_of(Settings(kernel_limits={FEW_ROWS.name: 3})):
        assert FEW_ROWS.limit == 3
        assert FEW_ROWS.exceeded_by(4)
    assert FEW_ROWS.limit == default
