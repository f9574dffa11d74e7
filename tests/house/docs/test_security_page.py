"""The mechanisms and tests named on the security page exist."""

from __future__ import annotations

import re
from pathlib import Path

_PATH = re.compile(r"`([a-z_]+/[\w/.]*|[a-z_]+\.py)`")


def test_each_file_named_on_the_page_exists(root: Path) -> None:
    text = (root / "docs" / "guides" / "security.md").read_text()
    named = _PATH.findall(text)
    assert len(named) > 30
    places = (root, root / "src" / "actors")
    assert [name for name in named if not any((each / name).exists() for each in places)] == []
