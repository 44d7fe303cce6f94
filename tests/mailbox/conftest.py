"""Importing torch and transformers takes seconds, and some of these tests lose many agents."""

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from tests.servers import ROOT
from tpu_tgi_server.mailbox import process


@pytest.fixture(scope="module")
def agents_fork_from_a_process_that_has_the_libraries() -> Iterator[None]:
    """Agents are processes of their own all the same. Spawned ones, as in production, are in the tests of servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "CONTEXT", multiprocessing.get_context("forkserver"))
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
        multiprocessing.set_forkserver_preload(["tpu_tgi_server.mailbox.agent", "tests.scripted"])
        yield
