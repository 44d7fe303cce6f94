"""What `--parallel auto` comes to on this host, decided before any process may hold a device."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from loguru import logger

from tpu_tgi_server.config import Device, Dtype, Parallel, Settings
from tpu_tgi_server.mailbox.messages import Measured, Progress
from tpu_tgi_server.mailbox.process import AgentProcess
from tpu_tgi_server.mailbox.shares import tpu_chips
from tpu_tgi_server.runtime.chips import CHIPS, find_chip
from tpu_tgi_server.runtime.parallel import ModelNeeds, choose_parallel, gigabytes

SMALLEST_CHIP = CHIPS["v5e"]
"""Whatever comes after it will have more memory."""


async def resolve_parallel(
    settings: Settings,
    environment: Mapping[str, str],
    on_progress: Callable[[Progress], None],
    dev_folder: Path = Path("/dev"),
    pci_folder: Path = Path("/sys/bus/pci/devices"),
) -> Settings:
    """The same settings with `replica` or `tensor` in place of `auto`, and a line in the log that says why.

    Still `auto` means one model on one core: on the CPU, or on a single chip. A number of replicas is a choice too.

    Raises:
        AgentDiedError: the model cannot be read; the message says why.
    """
    if settings.parallel is not Parallel.AUTO or settings.device is not Device.TPU or settings.replicas is not None:
        return settings
    num_chips = len(tpu_chips(environment, dev_folder))
    if num_chips < 2:
        logger.info("parallel: one model on one chip, as {}", "there is no other" if num_chips else "no other is seen")
        return settings
    chip = find_chip(environment, pci_folder)
    if chip is None:
        taken = gigabytes(SMALLEST_CHIP.memory_bytes)
        logger.warning("the generation of the chips is not known, so each is taken to have {}", taken)
    needs = await measure(settings, on_progress)
    core_bytes = (chip or SMALLEST_CHIP).memory_bytes
    parallel, sentence = choose_parallel(needs, settings.max_batch_size, num_chips, core_bytes)
    logger.info("{}", sentence)
    return replace(settings, parallel=parallel)


async def measure(settings: Settings, on_progress: Callable[[Progress], None]) -> ModelNeeds:
    """What the model takes on a TPU, found out by a process that holds no device and ends when it has answered."""
    dtype = Dtype.BFLOAT16 if settings.dtype is Dtype.AUTO else settings.dtype
    on_host = replace(settings, device=Device.CPU, dtype=dtype, profile=None)
    process = AgentProcess(on_host, None, on_progress)
    try:
        measured = await asyncio.to_thread(process.receive, settings.load_timeout_s)
    finally:
        await asyncio.to_thread(process.stop)
    assert isinstance(measured, Measured)
    return measured.needs
