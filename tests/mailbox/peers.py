"""What may be at the other end of the root's connection, in place of an agent. Light, so that it starts at once."""

import time
from multiprocessing.connection import Connection

from tpu_tgi_server.config import Settings
from tpu_tgi_server.mailbox.messages import Progress
from tpu_tgi_server.mailbox.shares import Share

NUM_REPORTS = 5
SLOW_STEP_S = 0.5


def silent(_settings: Settings, _loader: str, _connection: Connection, _share: Share) -> None:
    """Never says a word."""
    time.sleep(600)


def slow(_settings: Settings, _loader: str, connection: Connection, _share: Share) -> None:
    """Reports one step after the other, and then nothing more."""
    for number in range(NUM_REPORTS):
        connection.send(Progress("loading", "step", number, NUM_REPORTS))
        time.sleep(SLOW_STEP_S)
    connection.recv()


def broken(_settings: Settings, _loader: str, _connection: Connection, _share: Share) -> None:
    """Ends at once."""
    raise SystemExit(3)
