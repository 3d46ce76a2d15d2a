# Makes .venv with torch and this project. Sourced by the commands beside it: setup EXTRAS.
#
# PYTHON: the interpreter (default python3). VENV: the folder (default .venv).
# A machine with an NVIDIA driver gets torch's CUDA build, another one the CPU build. CUDA_BUILD=1: or
# the CUDA build, gigabytes, where there is no CPU build.

TORCH_VERSION=2.13.0
TRITON_VERSION=3.6.0  # for the CPU build, which brings none; CUDA builds bring their own
CPU_INDEX=https://download.pytorch.org/whl/cpu
child= dots= pythons=  # process groups that a signal ends

setup() {
  local extras=$1 stamp wanted
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1
  venv=${VENV:-.venv}
  # Without pip it was cut off while it was made.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit("Python 3.10 or later is needed") if sys.version_info < (3, 10) else None' || return 1
    until_done "${PYTHON:-python3}" -m venv "$venv" || return 1
  fi
  stamp=$venv/installed-${extras:-alone}
  wanted=$(cat pyproject.toml scripts/setup.sh | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv (torch $TORCH_VERSION, extras: $extras); a few minutes the first time"
    install_torch && install_project "$extras" && echo "$wanted" >"$stamp" || return 1
  fi
}

# With extras for work on this project; without them as a user installs it, from a copy, because two
# installations at a time would disturb each other.
install_project() {
  if [ -n "$1" ]; then
    pip_install -e ".[$1]"
  else
    rm -rf "$venv/source" && mkdir "$venv/source" || return 1
    cp -r pyproject.toml setup.py scripts README.md LICENSE ./_fp8_*.py ./*_fp8 ./*_fp8_tools "$venv/source" || return 1
    pip_install "$venv/source"
  fi
}

# Sets up .venv-3.10 and the like, in the background, for the test under other Pythons than that of .venv:
# the versions that PYTHONS names, by default the lowest that pyproject.toml promises. The test says
# which are missing; nothing here fails the set-up, and what failed is tried again when these files change.
start_pythons() {
  set -m
  setup_pythons >/dev/null 2>&1 &
  pythons=$!
  set +m
  trap_signals
}

wait_for_pythons() {
  wait "$pythons" || true
  pythons=
}

setup_pythons() {
  local version wanted
  export PIP_COMPILE=0
  wanted=$(cat pyproject.toml scripts/setup.sh | cksum)
  for version in ${PYTHONS:-$(sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)}; do
    is_python "${PYTHON:-python3}" "$version" && continue  # that of .venv
    [ "$(cat ".venv-$version/tried" 2>/dev/null)" != "$wanted" ] || continue
    (PYTHON=$(find_python "$version") && VENV=.venv-$version && setup "") || true
    [ ! -d ".venv-$version" ] || echo "$wanted" >".venv-$version/tried"
  done
}

# Prints a working interpreter of this version: on the PATH, pyenv's or uv's.
find_python() {
  local found
  for found in $(type -ap "python$1") "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python \
    "$(uv python find "$1" 2>/dev/null)"; do
    if is_python "$found" "$1"; then
      echo "$found"
      return
    fi
  done
  return 1
}

is_python() {
  "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null
}

pip_install() {
  until_done "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# Runs a command, with a dot every ten seconds. A signal ends it and whatever else was started, and is
# then this script's exit status: bash alone would wait for the command, or leave it behind.
until_done() {
  local status=0
  set -m  # the command and the dots get process groups of their own
  "$@" &
  child=$!
  (while sleep 10; do printf . >&2; done) &
  dots=$!
  set +m
  trap_signals
  wait "$child" || status=$?
  end_groups "$child" "$dots"
  child= dots=
  [ -n "$pythons" ] || trap - TERM INT HUP
  return "$status"
}

trap_signals() {
  trap 'end_groups $child $dots $pythons; exit 143' TERM
  trap 'end_groups $child $dots $pythons; exit 130' INT
  trap 'end_groups $child $dots $pythons; exit 129' HUP
}

end_groups() {
  local group
  for group; do
    kill -TERM -- "-$group" 2>/dev/null || true
  done
  wait "$@" 2>/dev/null || true
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
  # package. Gigabytes of CUDA are loaded where CUDA_BUILD asks for them alone.
  pip_install "torch==$TORCH_VERSION+cpu" "triton==$TRITON_VERSION" 2>/dev/null ||
    pip_install --extra-index-url "$CPU_INDEX" "torch==$TORCH_VERSION+cpu" "triton==$TRITON_VERSION" 2>/dev/null ||
    { [ -n "${CUDA_BUILD:-}" ] && pip_install "torch==$TORCH_VERSION"; } ||
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
