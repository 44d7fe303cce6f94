"""The build step that generates the gRPC stubs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with newly generated stubs."""
    folder = tmp_path_factory.mktemp("stubs")
    generate = "import sys, setuptools; setuptools.setup = lambda **_: None; import setup, pathlib; "
    generate += "setup.generate_stubs(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", generate, str(folder)], cwd=ROOT, check=True)
    return folder


def test_stubs_of_both_versions_are_generated_where_they_are_asked_for(generated: Path) -> None:
    made = {str(path.relative_to(generated)) for path in generated.rglob("*") if path.is_file()}
    names = ("__init__.py", "generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py")
    stubs = {f"tpu_tgi_server/pb/{version}/{name}" for version in ("v2", "v3") for name in names}
    assert made == {*stubs, "tpu_tgi_server/pb/__init__.py"}


def test_stubs_of_both_versions_live_in_one_process(generated: Path) -> None:
    use = "from tpu_tgi_server.pb.v2 import generate_pb2 as v2, generate_pb2_grpc\n"
    use += "from tpu_tgi_server.pb.v3 import generate_pb2 as v3, generate_pb2_grpc\n"
    use += "print(v2.DESCRIPTOR.package, v3.DESCRIPTOR.package)"
    command = [sys.executable, "-c", use]
    done = subprocess.run(
        command, cwd=generated, env={"PYTHONPATH": str(generated)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "generate.v2 generate.v3\n"


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_stubs_in_use_are_those_of_the_proto_file(generated: Path, version: str) -> None:
    """A stale stub would hide a change in proto/."""
    path = f"tpu_tgi_server/pb/{version}/generate_pb2.py"
    assert (ROOT / "src" / path).read_text() == (generated / path).read_text()
