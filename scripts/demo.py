"""Start the server on the demo model, ask it four questions at once, and stop it."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
PROMPTS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
]


def wait_for(socket: Path, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server is ready.

    Raises:
        SystemExit: it ended instead.
    """
    while not socket.exists():
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        time.sleep(0.1)


def main() -> int:
    model = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        uds_path = Path(folder) / "demo"
        server = subprocess.Popen([BIN / "tpu-tgi-serve", "--model-id", model, "--uds-path", uds_path])
        try:
            wait_for(Path(f"{uds_path}-0"), server)
            options = ["--uds-path", str(uds_path), "--max-new-tokens", "64"]
            return subprocess.run([str(BIN / "tpu-tgi"), "generate", *options, *PROMPTS], check=False).returncode
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
