"""Which files a model consists of, and whether a folder has them all. The folder of an operator is never written to.

Only safetensors are taken: other formats can run code when they are read.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from loguru import logger

from tpu_tgi_server.config import Settings
from tpu_tgi_server.model import hub

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "vocab.*", "additional_chat_templates/*.jinja")
CODE_FILES = ("*.py",)

OnFile = Callable[[str, int, int], None]
"""Called as each file has been downloaded, with its name, how many are done, and how many there are."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is: config and tokenizer in `folder`, weights in `weights_folder`, which is mostly the same."""

    folder: Path
    weights_folder: Path


def log_file(name: str, done: int, total: int) -> None:
    """One record a file."""
    logger.info("downloaded {} ({}/{})", name, done, total)


def find_model_files(settings: Settings, on_file: OnFile = log_file) -> ModelFiles:
    """The complete files of a model: of `model_id` itself if it is a folder, else of the hub, fetched if need be.

    Raises:
        OSError: no such model, no access to it, no way to reach it, or it is not one that can be served.
    """
    override = settings.weights_cache_override
    folder = _local_folder(settings) or _fetch(settings, on_file)
    check_folder(folder, needs_weights=override is None)
    if override is not None:
        check_weights(override)
    return ModelFiles(folder, override or folder)


def find_config_folder(settings: Settings) -> Path:
    """The folder with the config.json of a model, whose weights need not be there; fetched from the hub if need be.

    Raises:
        OSError: no such model, no access to it, or no way to reach it.
    """
    folder = _local_folder(settings)
    if folder is not None:
        check_names({path.name for path in folder.iterdir()}, str(folder), needs_weights=False)
        return folder
    repository = _repository(settings)
    listing = repository.list_files()
    if listing is None:
        return repository.cached_snapshot()
    check_names(listing.names, settings.model_id, needs_weights=False)
    code = (name for name in listing.names if settings.trust_remote_code and _is_wanted(name, CODE_FILES))
    return [repository.download(name, listing.commit) for name in (*code, CONFIG)][-1].parent


def _local_folder(settings: Settings) -> Path | None:
    """The model's folder, None if `model_id` is no folder but a name on the hub."""
    folder = Path(settings.model_id)
    if not folder.is_dir():
        return None
    if settings.revision:
        logger.warning("--revision {} is ignored: {} is a folder", settings.revision, folder)
    if (folder / "snapshots").is_dir():
        raise OSError(f"{folder} is an entry of a hub cache: give one of the folders in {folder / 'snapshots'}")
    return folder


def _repository(settings: Settings) -> hub.Repository:
    return hub.Repository(settings.model_id, settings.revision, settings.huggingface_hub_cache, settings.hf_token)


def _fetch(settings: Settings, on_file: OnFile) -> Path:
    """A snapshot of what is needed from a model on the hub."""
    repository = _repository(settings)
    listing = repository.list_files()
    if listing is None:
        return repository.cached_snapshot()
    needs_weights = settings.weights_cache_override is None
    check_names(listing.names, settings.model_id, needs_weights)
    patterns = SMALL_FILES + (CODE_FILES if settings.trust_remote_code else ())
    wanted = {name for name in listing.names if _is_wanted(name, patterns)}
    if needs_weights and WEIGHTS in listing.names:
        wanted.add(WEIGHTS)
    elif needs_weights:
        index = repository.download(WEIGHTS_INDEX, listing.commit)
        wanted |= {WEIGHTS_INDEX, *shards_of(index)}
    return repository.snapshot(listing, sorted(wanted), on_file)


def _is_wanted(name: str, patterns: Collection[str]) -> bool:
    """Whether a file is one of a model's small files; indexes of weights in any format are looked at elsewhere."""
    if name.endswith(".index.json"):
        return False
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def check_folder(folder: Path, needs_weights: bool = True) -> None:
    """Check that all files of a model are there.

    Raises:
        OSError: one is missing, or the folder is not one that can be served; the message says why.
    """
    check_names({path.name for path in folder.iterdir()}, str(folder), needs_weights)
    if needs_weights:
        check_weights(folder)


def check_names(names: Collection[str], where: str, needs_weights: bool) -> None:
    """Check from the names of a model's files that it can be served.

    Raises:
        OSError: it cannot; the message says why.
    """
    if ADAPTER_CONFIG in names:
        raise OSError(f"{where} is a PEFT adapter: merge it into its base model, save that, and serve the result")
    if CONFIG not in names:
        raise OSError(f"{where} is not a model: there is no config.json in it")
    if not needs_weights or WEIGHTS in names or WEIGHTS_INDEX in names:
        return
    if any(fnmatch(name, pattern) for name in names for pattern in PICKLED_WEIGHTS):
        raise OSError(f"{where} has its weights in a format that can run code: convert them to safetensors first")
    raise OSError(f"{where} has no weights: there is neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def check_weights(folder: Path) -> None:
    """Check that a folder has all weights that it should have.

    Raises:
        OSError: some are missing.
    """
    if (folder / WEIGHTS).is_file():
        return
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        raise OSError(f"{folder} has no weights: there is neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    missing = sorted(name for name in shards_of(index) if not (folder / name).is_file())
    if missing:
        raise OSError(f"{folder} is incomplete: {', '.join(missing)} missing")


def weight_paths(folder: Path) -> list[Path]:
    """The files that hold a complete folder's weights."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(shards_of(folder / WEIGHTS_INDEX))]


def shards_of(index: Path) -> set[str]:
    """The names of the weight files that an index lists.

    Raises:
        OSError: it is not an index, or it leads out of its folder.
    """
    try:
        names = set(map(str, json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise OSError(f"{index} is not an index of weights") from error
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        raise OSError(f"{index} lists files outside of its folder")
    return names


def needs_code(folder: Path) -> str:
    """What to tell an operator about a model that brings code of its own."""
    return f"{folder} needs code that comes with the model: read it, and if you trust it, give --trust-remote-code"
