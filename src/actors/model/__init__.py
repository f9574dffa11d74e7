"""Descriptions without behaviour: plans, messages, and PostgreSQL's protocol."""
