#!/bin/sh
# install_by_uv.sh LOCK PYTHON: what LOCK names for PYTHON, by the uv that LOCK names: it takes a third of pip's processor time, and both cores.
# Fails without a change where pip has to do it: pip has settings that are not passed on here, or uv can't get a package.
set -eu
lock=$1
python=$2
settings=$("$python" -m pip config list)
setting() {
    echo "$settings" | sed -n "s/^.*\.$1='\(.*\)'\$/\1/p" | tail -n 1
}
others=$(echo "$settings" | grep -vE "^$|\.(cache-dir|cert|config-file|default-timeout|disable-pip-version-check|find-links|index-url|no-cache-dir|quiet|retries|timeout)=" || true)
if [ -n "$others" ]; then
    echo "pip installs, since uv knows nothing of pip's settings:" $(echo "$others" | sed 's/=.*//')
    exit 1
fi
index=$(setting index-url) certificates=$(setting cert)
set -- pip install --quiet --python "$python" --requirement "$lock"
[ -z "$index" ] || set -- "$@" --default-index "$index"
for links in $(setting find-links); do set -- "$@" --find-links "$links"; done
[ -z "$certificates" ] || export SSL_CERT_FILE="$certificates"
bin=$(dirname "$python")
"$python" -m pip install -qq --no-compile --no-deps "$(grep '^uv==' "$lock")"
# Beside the environment, where its files can be linked to, and in nobody's cache.
UV_CACHE_DIR=$(mktemp -d "$bin/../.uv.XXXXXX")
export UV_CACHE_DIR
trap 'rm -rf "$UV_CACHE_DIR"' EXIT
"$bin/uv" "$@" || {
    echo "uv failed: pip installs"
    exit 1
}
