"""The server as a process of its own, with the scripted model.

python -m tests.scripted_server UDS_PATH FAULTS [SETTINGS]

SETTINGS is a JSON object: fields of `Settings` that differ from the defaults.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.logs import configure_logging
from tpu_tgi_server.progress import log_progress
from tpu_tgi_server.service.lifecycle import serve


def main(uds_path: str, faults: str, changes: str = "{}") -> int:
    settings = Settings(faults, uds_path=Path(uds_path), device=Device.CPU, max_batch_size=4, json_output=True)
    settings = replace(settings, **json.loads(changes))
    configure_logging(settings.logger_level, settings.json_output)
    return asyncio.run(serve(settings, log_progress, loader="tests.scripted:load_scripted"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
