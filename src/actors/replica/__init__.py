"""A whole replica: its connections, both halves of its workers, its dataflows."""
