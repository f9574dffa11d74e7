"""The error for constructs that no rule knows."""

from __future__ import annotations


class UnsupportedConstruct(Exception):
    """No rule knows this construct; the text names it. The view, or the node, is then opaque."""
