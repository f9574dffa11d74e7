"""The things that are said, never how they are done: plans, messages, PostgreSQL's protocol."""
