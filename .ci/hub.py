"""Writes a folder that Hugging Face's ``kernels`` library loads the package from: python .ci/hub.py [FOLDER], by default build/.

    FOLDER/torch-universal/sparse_flash/     the package with its patterns, without the command line and the benchmark
    FOLDER/torch-universal/metadata.json     ``id``: the name that it is imported under, and that of its operators

Releases of ``kernels`` that do not read metadata.json make a name of the folder's path.
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


def build(folder: Path) -> Path:
    """Replaces FOLDER/torch-universal; returns its path."""
    variant = folder / "torch-universal"
    shutil.rmtree(variant, ignore_errors=True)
    installed = PROJECT["tool"]["setuptools"]
    for name in installed["packages"]:
        if not name.startswith(LEFT_OUT):
            target = variant / name.replace(".", "/")
            target.mkdir(parents=True)
            for kind in ["*.py", *installed["package-data"].get(name, [])]:
                for file in (ROOT / installed["package-dir"].get(name, name.replace(".", "/"))).glob(kind):
                    shutil.copy(file, target)
    (variant / "sparse_flash" / "__main__.py").unlink()  # the command line
    shutil.copy(ROOT / "LICENSE", variant / "sparse_flash")

    files = {path.relative_to(variant).as_posix(): path.read_bytes() for path in sorted(variant.rglob("*")) if path.is_file()}
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    whole = hashlib.sha256(b"".join(name.encode() + digest for name, digest in digests.items())).hexdigest()
    metadata = {
        "name": PROJECT["project"]["name"],
        "id": f"_sparse_flash_{whole[:12]}",  # differs if any file differs
        "version": 0,  # the Hub's number of an interface that may still change
        "license": PROJECT["project"]["license"],
        "python-depends": [],  # the Hub's list has neither numpy nor scipy, which must be installed
        "backend": {"type": "cuda"},
        "digest": {"algorithm": "sha256", "files": {name: base64.b64encode(digests[name]).decode() for name in digests}},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return variant


if __name__ == "__main__":
    print(build(Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT / "build"))
