"""The Python client: protocol messages, transport and Arrow, and nothing of the service."""

# The whole public face: what users import, and nothing that loads more than they need.
from actors.doors.client.client import ChangeBatch as ChangeBatch
from actors.doors.client.client import Client as Client
from actors.doors.client.client import CopiedRows as CopiedRows
from actors.doors.client.client import CopiedTo as CopiedTo
from actors.doors.client.client import Rows as Rows
from actors.doors.client.client import TableWrite as TableWrite
from actors.doors.client.client import concatenate_pieces as concatenate_pieces
