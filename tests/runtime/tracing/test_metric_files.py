"""The docs, the dashboard and the alerts are those of the table of metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from actors.runtime.alert_table import ALERTS
from actors.runtime.metric_table import METRICS
from tests.kit import metric_files

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {
    metric.family + suffix for metric in METRICS for suffix in SUFFIXES.get(metric.kind, ("",))
}
NAME = re.compile(r"\bpenstock_\w+")
LABELS = {label for metric in METRICS for label in metric.label_names}


def unknown_names(expression: str) -> set[str]:
    """Names in an expression that no metric and no label has."""
    return set(NAME.findall(expression)) - SERIES - LABELS


@pytest.mark.parametrize("path", metric_files.FILES, ids=str)
def test_a_file_is_what_the_table_makes(path: Path, root: Path) -> None:
    made = metric_files.FILES[path]()
    assert (root / path).read_text() == made, "run python -m tests.kit.metric_files"


def test_names_and_alerts_are_unique_and_sentences_are_whole() -> None:
    families = [metric.family for metric in METRICS]
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    alerts = [rule.name for rule in ALERTS]
    assert len(set(families)) == len(families)
    assert len(set(alerts)) == len(alerts)
    groups = [group for group, _ in metric_files.grouped()]
    assert len(set(groups)) == len(groups), "a group's metrics stand together"
    for metric in METRICS:
        for sentence in (metric.text, metric.action):
            assert sentence[:1].isupper() or sentence[:1] == "`", metric.name
            assert sentence.endswith("."), metric.name
            assert "|" not in sentence, metric.name


def test_alerts_and_panels_ask_for_metrics_of_the_table() -> None:
    groups = yaml.safe_load(metric_files.alerts())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["alert"] for rule in rules] == [rule.name for rule in ALERTS]
    assert [each.name for each in ALERTS if each.metric.family not in each.expression] == []
    panels = json.loads(metric_files.dashboard())["panels"]
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert len(shown) == len(METRICS)
    expressions = [target["expr"] for panel in shown for target in panel["targets"]]
    expressions += [rule["expr"] for rule in rules]
    assert [each for each in expressions if unknown_names(each)] == []
    # The check itself: a name with a typing error is found.
    assert unknown_names("rate(penstock_stepz_total[5m])") == {"penstock_stepz_total"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(metric_files.dashboard())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= metric_files.COLUMNS
        taken |= cells


def test_prometheus_accepts_the_rules_and_queries(root: Path, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (Debian's package prometheus)")
    # The dashboard's queries, too: as rules that record them.
    recorded = [
        {
            "record": f"penstock:panel{number}",
            "expr": metric_files.query_of(metric, "").replace("$__rate_interval", "5m"),
        }
        for number, metric in enumerate(METRICS)
    ]
    queries = tmp_path / "queries.yaml"
    queries.write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    checked = subprocess.run(
        [promtool, "check", "rules", root / metric_files.RULES, queries],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in checked.stdout
    assert f"SUCCESS: {len(METRICS)} rules found" in checked.stdout
