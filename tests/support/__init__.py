"""Tools of the tests: waiting with a deadline, servers and proxies as child processes, factories.

`from tests.support import eventually, Server, TcpProxy, PostgresProxy, in_threads, factories`
"""

from tests.support.polling import eventually, eventually_async
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Server, database_url, free_port, run_manage, start_manage
from tests.support.tcp_proxy import TcpProxy
from tests.support.threads import in_threads

__all__ = [
    "PostgresProxy",
    "Server",
    "TcpProxy",
    "database_url",
    "eventually",
    "eventually_async",
    "free_port",
    "in_threads",
    "run_manage",
    "start_manage",
]
