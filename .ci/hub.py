"""Writes the folder of a kernel that Hugging Face's ``kernels`` library loads: python .ci/hub.py [FOLDER], by default build/.

    FOLDER/torch-cuda/                   the package with its patterns, without the command line and the benchmark
    FOLDER/torch-cuda/metadata.json      ``id``: the name that it is imported under, and that of its operators
    FOLDER/torch-cpu/                    the same, under another name

Format: https://huggingface.co/docs/kernels/kernel-requirements (kernels 0.17).
"""

import base64
import hashlib
import json
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LEFT_OUT = ("sparse_flash.benchmarks", "sparse_flash.cli")
BACKENDS = ("cuda", "cpu")


def build(folder: Path) -> dict[str, Path]:
    """Replaces the variants in the folder; returns their paths by back end."""
    return {backend: _build(folder / f"torch-{backend}", backend) for backend in BACKENDS}


def _build(variant: Path, backend: str) -> Path:
    shutil.rmtree(variant, ignore_errors=True)
    installed = PROJECT["tool"]["setuptools"]
    for name in installed["packages"]:
        if not name.startswith(LEFT_OUT):
            target = variant.joinpath(*name.split(".")[1:])
            target.mkdir(parents=True)
            for kind in ["*.py", *installed["package-data"].get(name, [])]:
                for file in (ROOT / installed["package-dir"].get(name, name.replace(".", "/"))).glob(kind):
                    shutil.copy(file, target)
    (variant / "__main__.py").unlink()  # the command line
    shutil.copy(ROOT / "LICENSE", variant)

    files = {path.relative_to(variant).as_posix(): path.read_bytes() for path in sorted(variant.rglob("*")) if path.is_file()}
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    whole = hashlib.sha256(b"".join(name.encode() + digest for name, digest in digests.items())).hexdigest()
    metadata = {
        "name": PROJECT["project"]["name"],
        "id": f"_sparse_flash_{backend}_{whole[:12]}",  # differs if any file differs
        "version": 1,  # which Transformers asks for: the branch v1 of the Hub's repository
        "license": PROJECT["project"]["license"],
        "python-depends": [],  # the Hub's list has neither numpy nor scipy
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {name: base64.b64encode(digests[name]).decode() for name in digests}},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return variant


if __name__ == "__main__":
    print(*build(Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT / "build").values(), sep="\n")
