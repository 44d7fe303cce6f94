"""The one build step that pyproject.toml cannot express: gRPC stubs are generated from proto/ into the package.

It runs for wheels, sdists and editable installs alike, so that stubs are never committed and never stale.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGE = "tpu_tgi_server/pb"
VERSIONS = {"v2": ROOT / "proto", "v3": ROOT / "proto" / "v3"}


def generate_stubs(target: Path) -> None:
    """Write `target`/tpu_tgi_server/pb/<version>/generate_pb2*.py(i) for every version of the protocol.

    Each version is mapped to the path of its package, so that the imports inside the stubs are absolute and both
    versions can live in one process.
    """
    from grpc_tools import protoc

    for version, folder in VERSIONS.items():
        package = f"{PACKAGE}/{version}"
        (target / package).mkdir(parents=True, exist_ok=True)
        (target / package / "__init__.py").touch()
        arguments = [f"-I{package}={folder}"]
        arguments += [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", *arguments, f"{package}/generate.proto"]) != 0:
            raise RuntimeError(f"protoc failed on {folder / 'generate.proto'}")
    (target / PACKAGE / "__init__.py").write_text('"""Generated from proto/ by setup.py; not to be edited."""\n')


class BuildWithStubs(build_py):
    """build_py that generates the stubs into the build, or into src/ for an editable install."""

    def run(self) -> None:
        generate_stubs(ROOT / "src" if self.editable_mode else Path(self.build_lib))
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
