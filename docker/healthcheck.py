"""Status 0 if the router in this container says that it can answer, for Docker's HEALTHCHECK."""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 8.0


def is_healthy(port: str) -> bool:
    """Whether GET /health is answered with status 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if is_healthy(os.environ.get("PORT") or "80") else 1)
