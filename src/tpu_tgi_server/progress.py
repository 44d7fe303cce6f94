"""How loading and warm-up look to whoever started the server: a bar on a terminal, elsewhere a log line a step."""

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
    """Owns the bar that is on the terminal, one for each stage that begins."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[step]}"),
            )
            self._bar.start()
            self._task = self._bar.add_task(progress.stage, total=progress.total, step="")
        self._bar.update(self._task, completed=progress.done, step=progress.step)
        if progress.done == progress.total:
            self._bar.stop()
            self._bar = None
