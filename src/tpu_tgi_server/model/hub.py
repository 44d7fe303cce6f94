"""One model on the hub: what it has, what of it is in the local cache, and fetching the rest.

Everything that goes wrong comes out as an OSError of one line, with the hub's own words in it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    HfApi,
    hf_hub_download,
    is_offline_mode,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars
from loguru import logger

T = TypeVar("T")

MAX_TRIES = 5
FIRST_WAIT_S = 1.0
"""Waited before the second try, and doubled before each one after it."""

MAX_DOWNLOADS = 8
TOO_MANY_REQUESTS = 429


@dataclass(frozen=True)
class Listing:
    """The files of one commit, with their sizes in bytes."""

    commit: str
    sizes: dict[str, int]

    @property
    def names(self) -> set[str]:
        return set(self.sizes)


@dataclass(frozen=True)
class Repository:
    """A model on the hub at a revision, seen through a cache folder. None means huggingface_hub's own default."""

    model_id: str
    revision: str | None
    cache: Path | None
    token: str | None

    def list_files(self) -> Listing | None:
        """What the hub has, or None in offline mode and, with a warning, if the hub does not answer but the cache does.

        Raises:
            OSError: no such model or revision, no access to it, or no hub and nothing in the cache.
        """
        if is_offline_mode():
            return None
        api = HfApi(token=self.token)
        try:
            with _one_line(self.model_id):
                info = with_retries(lambda: api.model_info(self.model_id, revision=self.revision, files_metadata=True))
        except OSError as error:
            if not is_transient(error.__cause__) or self._cached("config.json", self.revision) is None:
                raise
            logger.warning("taking {} from the cache: {}", self.model_id, error)
            return None
        return Listing(info.sha, {file.rfilename: file.size or 0 for file in info.siblings})

    def cached_snapshot(self) -> Path:
        """The folder of the revision in the cache, perhaps incomplete.

        Raises:
            OSError: there is none.
        """
        config = self._cached("config.json", self.revision)
        if config is None:
            at = f" at {self.revision}" if self.revision else ""
            raise OSError(
                f"{self.model_id}{at} is neither a folder nor in the cache, and HF_HUB_OFFLINE forbids to fetch it"
            )
        return config.parent

    def download(self, name: str, commit: str) -> Path:
        """Fetch a file of a commit, unless it is in the cache.

        Raises:
            OSError: it cannot be fetched.
        """

        def fetch() -> Path:
            return Path(hf_hub_download(self.model_id, name, revision=commit, cache_dir=self.cache, token=self.token))

        with _one_line(f"{self.model_id}/{name}"):
            return with_retries(fetch)

    def snapshot(self, listing: Listing, names: Sequence[str], on_file: Callable[[str, int, int], None]) -> Path:
        """The folder that has these files of a commit; missing ones are fetched, several at a time.

        Raises:
            OSError: one cannot be fetched.
        """
        disable_progress_bars()  # on_file reports
        missing = [name for name in names if self._cached(name, listing.commit) is None]
        if missing:
            num_bytes = sum(listing.sizes.get(name, 0) for name in missing)
            logger.info("downloading {}: {} files, {:.1f} MB", self.model_id, len(missing), num_bytes / 1e6)
            self._download_all(missing, listing.commit, on_file)
        current = self._cached("config.json", self.revision)
        if current is None or current.parent.name != listing.commit:
            # makes the revision's name point to the commit, so that it is found without the hub
            with _one_line(self.model_id):
                return Path(
                    with_retries(
                        lambda: snapshot_download(
                            self.model_id,
                            revision=self.revision,
                            cache_dir=self.cache,
                            token=self.token,
                            allow_patterns=list(names),
                        )
                    )
                )
        return current.parent

    def _download_all(self, names: Sequence[str], commit: str, on_file: Callable[[str, int, int], None]) -> None:
        with ThreadPoolExecutor(MAX_DOWNLOADS) as pool:
            running = {pool.submit(self.download, name, commit): name for name in names}
            try:
                for done, future in enumerate(as_completed(running), start=1):
                    future.result()
                    on_file(running[future], done, len(names))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _cached(self, name: str, revision: str | None) -> Path | None:
        try:
            path = try_to_load_from_cache(self.model_id, name, cache_dir=self.cache, revision=revision)
        except HFValidationError as error:
            raise OSError(f"{self.model_id} is neither a folder nor the name of a model on the hub") from error
        return Path(path) if isinstance(path, str) else None


def is_transient(error: BaseException | None) -> bool:
    """Whether it may help to try again."""
    if isinstance(error, HfHubHTTPError):
        status: int = error.response.status_code
        return status >= 500 or status == TOO_MANY_REQUESTS
    return isinstance(error, HTTPError | LocalEntryNotFoundError | ConnectionError)


def with_retries(call: Callable[[], T]) -> T:
    """Call again, after longer and longer waits, while it fails for a reason that may pass."""
    for number in range(1, MAX_TRIES):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            wait_s = FIRST_WAIT_S * 2 ** (number - 1)
            logger.warning("try {} of {} failed, next in {:g} s: {}", number, MAX_TRIES, wait_s, _in_a_line(error))
            time.sleep(wait_s)
    return call()


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise OSError(f"{what} is neither a folder nor the name of a model on the hub") from error
    except (OSError, HTTPError) as error:
        raise OSError(f"cannot fetch {what}: {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
