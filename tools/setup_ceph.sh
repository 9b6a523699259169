#!/usr/bin/env bash
# Installs the Ceph daemons that `make test-all` starts on loopback, where they are missing. Debian and Ubuntu, as root.
set -euo pipefail

missing=()
for program in ceph-mon ceph-osd radosgw; do
  command -v "$program" >/dev/null || missing+=("$program")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "setup_ceph: not installed: ${missing[*]}. Install radosgw, ceph-mon and ceph-osd with your package" >&2
  echo "setup_ceph: manager, or run the tests without them: make test" >&2
  exit 1
fi
echo "setup_ceph: installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd
}
if ! { apt-get update && install; } </dev/null >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "setup_ceph: apt-get failed, see above" >&2
  exit 1
fi
