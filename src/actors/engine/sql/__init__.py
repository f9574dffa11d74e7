"""The SQL that users write: the lexer, the grammar of statements, and PostgreSQL's dialect.
Pure."""
