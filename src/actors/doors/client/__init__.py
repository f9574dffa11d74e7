"""The Python client. It loads the protocol's messages, the transport and Arrow, not the service."""

# The complete public interface. Nothing here may load more than users of the client need.
from actors.doors.client.client import ChangeBatch as ChangeBatch
from actors.doors.client.client import Client as Client
from actors.doors.client.client import CopiedRows as CopiedRows
from actors.doors.client.client import CopiedTo as CopiedTo
from actors.doors.client.client import Rows as Rows
from actors.doors.client.client import TableWrite as TableWrite
from actors.doors.client.client import concatenate_pieces as concatenate_pieces
