"""Writes the files that come from the table of metrics (`actors.runtime.metric_table`).

    python -m tests.kit.metric_files

writes docs/reference/metrics.md, the alerts of Prometheus and the dashboard of Grafana.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, groupby
from pathlib import Path
from typing import Any, Final

from actors.runtime.alert_table import ALERTS
from actors.runtime.measurement import MetricDefinition
from actors.runtime.metric_table import METRICS
from actors.runtime.telemetry import DATAFLOW, OBJECT

PAGE: Final = Path("docs", "reference", "metrics.md")
RULES: Final = Path("deploy", "prometheus-alerts.yaml")
DASHBOARD: Final = Path("deploy", "grafana-dashboard.json")
BY: Final = "actors.runtime.metric_table; run `python -m tests.kit.metric_files` to write this file"
COLUMNS: Final = 24
"""Width of a dashboard, in units of Grafana's grid."""
PANEL_WIDTH: Final = 8
PANEL_HEIGHT: Final = 7
UNITS: Final = {"seconds": "s", "milliseconds": "ms", "bytes": "bytes", "": "short"}
"""Units of Grafana."""
NAMED: Final = (
    " * on (penstock_dataflow) group_left (penstock_object) "
    "max by (penstock_dataflow, penstock_object) (penstock_object_info)"
)
"""PromQL that gives a series of a dataflow the name of its object."""
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def grouped() -> Iterator[tuple[str, list[MetricDefinition]]]:
    """Yield the metrics by group."""
    for group, metrics in groupby(METRICS, key=lambda metric: metric.group):
        yield group, list(metrics)


# -- the page --------------------------------------------------------------------------------------


def page() -> str:
    """Return the page of the docs."""
    parts = [
        "# Metrics",
        f"<!-- from {BY} -->",
        "A service serves these metrics for Prometheus if `metrics_listen` is set:",
        "    penstock serve --set metrics_listen=127.0.0.1:9464",
        "They are on `http://127.0.0.1:9464/metrics`. An address that other machines can reach "
        "needs TLS and a token ([TLS and tokens](../guides/tls-and-tokens.md)).\nThe same listener "
        "serves [`/healthz` and `/readyz`](../guides/operations.md#health-and-readiness).",
        "Each process reports what it does itself: a controller its objects and sessions, a "
        "replica its dataflows and steps,\n`penstock wal serve` its logs. Counters start at zero "
        "with the process. The series of an object, dataflow or actor\nend with it: a dropped view "
        "has none. Labels are names from the catalog or from short, fixed lists.",
        "Dataflows have ids, as in `penstock.dataflows`. To give a series the name of its object, "
        f"append `{NAMED.strip()}`\nto a query such as `rate(penstock_steps_total[5m])`.",
        "`deploy/grafana-dashboard.json` shows all of them; import it into Grafana.\n"
        "`deploy/prometheus-alerts.yaml` has the [alerts](#alerts); name it under `rule_files` in "
        "Prometheus' configuration.",
    ]
    for group, metrics in grouped():
        rows = "".join(f"\n{_row(metric)}" for metric in metrics)
        parts.append(f"## {group}")
        parts.append(f"| metric | labels | meaning | when it is high |\n|---|---|---|---|{rows}")
    rows = "".join(
        f"\n| `{rule.name}` | {rule.severity} | `{rule.expression}` | {rule.minutes} min |"
        for rule in ALERTS
    )
    parts.append("## Alerts")
    parts.append(f"| alert | severity | condition | for |\n|---|---|---|---|{rows}")
    return "\n\n".join(parts) + "\n"


def _row(metric: MetricDefinition) -> str:
    name = metric.family + ("_total" if metric.kind == "counter" else "")
    kind = " (histogram)" if metric.kind == "histogram" else ""
    labels = ", ".join(f"`{label}`" for label in metric.label_names)
    return f"| `{name}`{kind} | {labels} | {metric.text} | {metric.action} |"


# -- alerts ----------------------------------------------------------------------------------------


def alerts() -> str:
    """Return the file of alert rules for Prometheus."""
    lines = [f"# From {BY}.", "groups:", "  - name: penstock", "    rules:"]
    for rule in ALERTS:
        # A JSON string is a YAML string too.
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {json.dumps(rule.expression)}",
            f"        for: {rule.minutes}m",
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {json.dumps(rule.summary)}",
            f"          description: {json.dumps(rule.metric.action)}",
        ]
    return "\n".join(lines) + "\n"


# -- the dashboard ---------------------------------------------------------------------------------


def dashboard() -> str:
    """Return Grafana's model of the dashboard: a row for each group, a panel for each metric."""
    panels: list[dict[str, Any]] = []
    ids, top = count(1), 0
    for group, metrics in grouped():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append({"id": next(ids), "type": "row", "title": group, "gridPos": place})
        top += 1
        for number, metric in enumerate(metrics):
            row, column = divmod(number, COLUMNS // PANEL_WIDTH)
            place = {
                "h": PANEL_HEIGHT,
                "w": PANEL_WIDTH,
                "x": column * PANEL_WIDTH,
                "y": top + row * PANEL_HEIGHT,
            }
            panels.append({"id": next(ids), **_panel(metric), "gridPos": place})
        top += -(-len(metrics) * PANEL_WIDTH // COLUMNS) * PANEL_HEIGHT
    model = {
        "title": "Penstock",
        "uid": "penstock",
        "description": f"From {BY}.",
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instance()]},
        "panels": panels,
    }
    return json.dumps(model, indent=1) + "\n"


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _instance() -> dict[str, Any]:
    every = {"selected": True, "text": "All", "value": "$__all"}
    query = 'label_values(target_info{service_name=~"penstock.*"}, instance)'
    return {
        "name": "instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "instance"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": every,
    }


def shown_labels(metric: MetricDefinition) -> tuple[str, ...]:
    """Return the labels of a panel: people know an object by its name, not by its dataflow's id."""
    if metric.labels == (DATAFLOW,):
        return (OBJECT.replace(".", "_"),)
    return metric.label_names


def query_of(metric: MetricDefinition, selector: str = '{instance=~"$instance"}') -> str:
    """Return the PromQL that shows a metric: a level as it is, a counter's rate, and the duration
    within which 99 % of a histogram's values are."""
    labels = ", ".join(shown_labels(metric))
    by = f" by ({labels})" if labels else ""
    named = NAMED if shown_labels(metric) != metric.label_names else ""
    rate = f"rate({metric.series}{selector}[$__rate_interval]){named}"
    match metric.kind:
        case "counter":
            return f"sum{by} ({rate})"
        case "histogram":
            kept = f"le, {labels}" if labels else "le"
            return f"histogram_quantile(0.99, sum by ({kept}) ({rate}))"
    # A level of several processes adds up; an age does not.
    combined = "max" if metric.unit == "milliseconds" else "sum"
    return f"{combined}{by} ({metric.series}{selector})"


def _panel(metric: MetricDefinition) -> dict[str, Any]:
    words = metric.name.removeprefix("penstock.").replace(".", " ").replace("_", " ")
    unit = UNITS[metric.unit]
    title = words.capitalize()
    if metric.kind == "counter":
        # A duration per second is a share of one core.
        unit = {"bytes": "Bps", "seconds": "percentunit"}.get(metric.unit, "ops")
        title += ", per second"
    elif metric.kind == "histogram":
        title += ", 99th percentile"
    legend = " ".join(f"{{{{{label}}}}}" for label in shown_labels(metric))
    target = {
        "refId": "A",
        "datasource": DATASOURCE,
        "expr": query_of(metric),
        "legendFormat": legend or words,
    }
    return {
        "type": "timeseries",
        "title": title,
        "description": f"{metric.text} When it is high: {metric.action}",
        "datasource": DATASOURCE,
        "targets": [target],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
    }


FILES: Final = {PAGE: page, RULES: alerts, DASHBOARD: dashboard}
"""The files, and the functions that make their texts."""

if __name__ == "__main__":
    for path, make in FILES.items():
        path.write_text(make())
