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
  # Without pip it was cut off while it was made.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit("Python 3.10 or later is needed") if sys.version_info < (3, 10) else None' || return 1
    until_done "${PYTHON:-python3}" -m venv "$venv" || return 1
  fi
  stamp=$venv/installed-$extras
  wanted=$(cat pyproject.toml "${BASH_SOURCE[0]}" | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv (torch $TORCH_VERSION, extras: $extras); a few minutes the first time"
    [ "$extras" != dev ] || install_browser &
    browser=$!
    install_torch && pip_install -e ".[$extras]" && echo "$wanted" >"$stamp" || return 1
    wait "$browser" || true
  fi
}

# Chromium, for the test that opens the page of `torch-fp8 report`, where root may have it by apt; it
# is skipped where there is none. Nothing here fails the set-up.
install_browser() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null || return 0
  local install=(timeout 120 apt-get install -y -qq --no-install-recommends chromium)
  DEBIAN_FRONTEND=noninteractive "${install[@]}" >/dev/null 2>&1 ||
    { timeout 60 apt-get update -qq && DEBIAN_FRONTEND=noninteractive "${install[@]}"; } \
      >/dev/null 2>&1 || true
}

pip_install() {
  until_done "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# Runs a command, with a dot every ten seconds. A signal ends it and whatever it has started, and is
# then this script's exit status: bash alone would wait for the command, or leave it behind.
until_done() {
  local status=0
  set -m  # the command and the dots get process groups of their own
  "$@" &
  child=$!
  (while sleep 10; do printf . >&2; done) &
  dots=$!
  set +m
  trap 'end_all; exit 143' TERM
  trap 'end_all; exit 130' INT
  trap 'end_all; exit 129' HUP
  wait "$child" || status=$?
  end_all
  trap - TERM INT HUP
  return "$status"
}

end_all() {
  kill -TERM -- "-$child" "-$dots" 2>/dev/null || true
  wait "$child" "$dots" 2>/dev/null || true
}

install_torch() {
  if "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
    return  # of whichever build: it is the user's choice
  fi
  if [ "$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null 2>&1; then
    pip_install "torch==$TORCH_VERSION"
    return
  fi
  # The CPU build: from the package index at hand if it has one, else from PyTorch's own. Where that
  # cannot be reached, the plain version serves if it is a CPU build there: it depends on no nvidia
  # package. Gigabytes of CUDA are never loaded by these commands.
  pip_install "torch==$TORCH_VERSION+cpu" "triton==$TRITON_VERSION" 2>/dev/null ||
    pip_install --extra-index-url "$CPU_INDEX" "torch==$TORCH_VERSION+cpu" "triton==$TRITON_VERSION" 2>/dev/null ||
    { plain_is_cpu && pip_install "torch==$TORCH_VERSION" "triton==$TRITON_VERSION"; } || {
      echo "There is no CPU build of torch $TORCH_VERSION in the package index at hand, and $CPU_INDEX" \
        "cannot be reached. Install one into $venv and repeat this command." >&2
      return 1
    }
}

plain_is_cpu() {
  local found
  found=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run \
    --ignore-installed --report - "torch==$TORCH_VERSION" 2>/dev/null) || return 1
  ! grep -qiE '"name": *"(nvidia|cuda)[-_]' <<<"$found"
}
