"""Maintained views: from SQL text to a relational plan and a delta plan, with one rule per file,
and their explanation."""
