"""Executes the SQL statements of one session, whichever protocol they arrive by."""

from actors.doors.sql_session.results import StatementResult as StatementResult
from actors.doors.sql_session.row_values import SqlParameter as SqlParameter
from actors.doors.sql_session.session import SqlSession as SqlSession
from actors.engine.sql.grammar import ParsedStatement as ParsedStatement
