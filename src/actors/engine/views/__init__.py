"""Views: SQL text → relational plan → delta plan, one rule a file, and its explanation."""
