# Makes .venv with torch and this project. Sourced by the commands beside it: setup EXTRAS.
#
# PYTHON: the interpreter (default python3). VENV: the folder (default .venv).
# A machine with an NVIDIA driver gets torch's CUDA build, another one the CPU build.

TORCH_VERSION=2.13.0
TRITON_VERSION=3.6.0  # for the CPU build, which brings none; CUDA builds bring their own
CPU_INDEX=https://download.pytorch.org/whl/cpu

setup() {
  local extras=$1 stamp wanted
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1
  venv=${VENV:-.venv}
  if ! [ -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit("Python 3.10 or later is needed") if sys.version_info < (3, 10) else None' || return 1
    "${PYTHON:-python3}" -m venv "$venv" || return 1
  fi
  stamp=$venv/installed-$extras
  wanted=$(cat pyproject.toml "${BASH_SOURCE[0]}" | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv (torch $TORCH_VERSION, extras: $extras); a few minutes the first time"
    install_torch && pip_install -e ".[$extras]" && echo "$wanted" >"$stamp" || return 1
  fi
}

pip_install() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

install_torch() {
  if [ "$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null 2>&1; then
    pip_install "torch==$TORCH_VERSION"
    return
  fi
  # The CPU build: from the package index at hand if it has one, else from PyTorch's own.
  pip_install "torch==$TORCH_VERSION+cpu" "triton==$TRITON_VERSION" 2>/dev/null ||
    pip_install --extra-index-url "$CPU_INDEX" "torch==$TORCH_VERSION+cpu" "triton==$TRITON_VERSION"
}
