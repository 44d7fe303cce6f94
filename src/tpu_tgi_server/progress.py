"""How loading and warm-up look to whoever started the server: a bar on a terminal, elsewhere a log line a step."""

import threading
from collections.abc import Callable

from loguru import logger
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tpu_tgi_server.mailbox.messages import Progress


def progress_display(is_terminal: bool) -> Callable[[Progress], None]:
    """A function to call with every step that is over. It may be called from any thread."""
    return ProgressBars() if is_terminal else log_progress


def log_progress(progress: Progress) -> None:
    """One record a step."""
    logger.info("{}: {} ({}/{})", progress.stage, progress.step, progress.done, progress.total)


class ProgressBars:
    """Owns the bars that are on the terminal, one for each stage that has begun, until all of them are full."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # each agent reports from a thread of its own
        self._bars: Bar | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            self._show(progress)

    def _show(self, progress: Progress) -> None:
        if self._bars is None:
            self._bars = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[step]}"),
            )
            self._bars.start()
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(progress.stage, total=progress.total, step="")
        self._bars.update(
            self._tasks[progress.stage], completed=progress.done, total=progress.total, step=progress.step
        )
        if self._bars.finished:
            self._bars.stop()
            self._bars = None
            self._tasks = {}
