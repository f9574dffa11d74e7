"""docs/reference/relations.md has the relations as their table has them: run this file as a program
to write them there."""

from __future__ import annotations

from pathlib import Path

from actors.model.protocol.relations import RELATIONS, SystemRelation

PAGE = Path("docs", "reference", "relations.md")


def section_of(relation: SystemRelation) -> str:
    rows = "".join(f"\n| `{c.name}` | {c.type} | {c.text} |" for c in relation.columns)
    table = f"| column | type | meaning |\n|---|---|---|{rows}"
    return f"### {relation.name}\n\n{relation.text}\n\n{table}"


def page_of_table(page: str) -> str:
    """The page, with its sections as the table of relations has them."""
    first = "## Kept by the controller"
    parts = [page.partition(f"{first}\n")[0].rstrip()]
    for keeper, title in (("controller", first), ("workers", "## Kept by the workers")):
        kept = [each for each in RELATIONS.values() if each.kept_by == keeper]
        parts += [title, *map(section_of, kept)]
    return "\n\n".join(parts) + "\n"


def test_the_page_is_the_table(root: Path) -> None:
    page = (root / PAGE).read_text()
    assert page == page_of_table(page), f"run {Path(__file__).name} as a program"


if __name__ == "__main__":
    PAGE.write_text(page_of_table(PAGE.read_text()))
