"""SQL as users write it: the lexer, the statements' grammar, and PostgreSQL's dialect. Pure."""
