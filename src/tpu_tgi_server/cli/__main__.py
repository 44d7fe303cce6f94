"""`python -m tpu_tgi_server.cli` is tpu-tgi-serve."""

from tpu_tgi_server.cli import serve_app

if __name__ == "__main__":
    serve_app()
