"""A replica: its workers behind one connection, and the transport below every connection.

What others use is re-exported here, once; `cluster.transport` stands by itself.
"""

from actors.cluster.client import ClusterClient as ClusterClient
from actors.cluster.client import LocalClient as LocalClient
from actors.cluster.client import WireClient as WireClient
from actors.cluster.client import connect as connect
from actors.cluster.cluster import Cluster as Cluster
from actors.cluster.cluster import ClusterStatistics as ClusterStatistics
