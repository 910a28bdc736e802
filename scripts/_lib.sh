# Shared by the scripts beside it (sourced, not run): finding a Python and keeping a virtual environment.
#
#   setup base          the gateway
#   setup demo          and the real engine with its model
#   setup otel          the gateway, and what it needs for traces
#   setup dev           and what the tests and checks need
#   setup bench         the gateway, a faster loop for the bench's own processes, and the proxies it compares with
#
# Afterwards $VENV holds what was asked for. A stamp in it says for which constraints.txt and pyproject.toml that is true, so
# the second time costs nothing and needs no network; an environment whose last installation broke off is made anew.
# Settings from outside: PYTHON (a Python to use; its environment is .venv-3.x), VENV (a folder for the environment).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NAME="scripts/$(basename "$0")"

say() { printf '%s\n' "$*"; }
step() { printf '==> %s\n' "$*"; }
fail() { # the message, a line an argument
    printf '\n%s: %s\n' "$NAME" "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit "${STATUS:-1}"
}

python_version() { # "3.11", or nothing if it doesn't run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

what_is() {
    local version
    version="$(python_version "$1")"
    echo "${version:-not to be run}"
}

suitable() {
    case "$(python_version "$1")" in 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac
}

find_python() { # sets PY
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 (it is: $(what_is "$PYTHON"))."
        PY="$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if suitable "$candidate"; then
            PY="$candidate"
            return
        fi
    done
    fail "no suitable Python found: 3.11, 3.12 or 3.13 is needed." \
        "Looked for python3, python3.13, python3.12 and python3.11 on the PATH; python3 is: $(what_is python3)" \
        "Install one, or say where it is: PYTHON=/path/to/python3.13 $NAME"
}

choose_venv() { # sets VENV; with PYTHON given, an environment of that version's own
    local version
    if [ -n "${VENV:-}" ]; then return; fi
    VENV="$ROOT/.venv"
    if [ -n "${PYTHON:-}" ]; then
        find_python
        version="$(python_version "$PY")"
        if ! grep -qs "^version = $version\." "$VENV/pyvenv.cfg"; then VENV="$ROOT/.venv-$version"; fi
    fi
}

digest() { # of what decides the environment's contents
    local sum=sha256sum
    command -v sha256sum >/dev/null || sum="shasum -a 256"
    cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" | $sum | cut -c1-64
}

is_set_up() { # GROUP: the stamp fits, and the environment's Python still runs
    [ ! -e "$VENV/.installing" ] && [ "$(cat "$VENV/.stamp-$1" 2>/dev/null)" = "$DIGEST" ] \
        && [ "$(cat "$VENV/.root" 2>/dev/null)" = "$ROOT" ] && "$VENV/bin/python" -c '' 2>/dev/null
}

setup() { # GROUP…
    local group missing=()
    choose_venv
    DIGEST="$(digest)"
    for group in "$@"; do is_set_up "$group" || missing+=("$group"); done
    if [ ${#missing[@]} -eq 0 ]; then return; fi

    check_writable
    # One at a time: a second script waits for the first. (The lock is on a file that's there anyway.)
    if command -v flock >/dev/null; then
        exec 9<"$ROOT/constraints.txt"
        flock --nonblock 9 || { say "Another script is installing; waiting for it."; flock 9; }
    fi
    for group in "$@"; do is_set_up "$group" || install_group "$group"; done
    exec 9<&-
}

check_writable() {
    local parent
    parent="$(dirname "$VENV")"
    if { [ -d "$VENV" ] && [ ! -w "$VENV" ]; } || { [ ! -d "$VENV" ] && [ ! -w "$parent" ]; }; then
        fail "nothing can be written to $parent, and the virtual environment belongs there." \
            "Copy the project to a folder that is yours, or name another place for the environment:" \
            "VENV=\$HOME/gateway-venv $NAME"
    fi
}

check_space() { # MEGABYTES, in the environment's folder
    local free
    free="$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print int($4 / 1024) }')"
    if [ "$free" -lt "$1" ]; then
        fail "about $1 MB of disk are needed in $(dirname "$VENV"), and $free MB are free." \
            "Make room, or name another place for the environment: VENV=/elsewhere/gateway-venv $NAME"
    fi
}

make_venv() {
    if [ -e "$VENV/.installing" ]; then
        say "An earlier installation into $VENV broke off; starting it again."
    elif [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 \
        && [ "$(cat "$VENV/.root" 2>/dev/null)" = "$ROOT" ]; then
        return
    fi
    find_python
    "$PY" -c 'import ensurepip, venv' 2>/dev/null || fail "$PY ($(python_version "$PY")) can't make virtual environments: its venv module isn't installed." \
        "On Debian and Ubuntu: apt-get install python$(python_version "$PY")-venv" \
        "Or use another Python: PYTHON=/path/to/python3.13 $NAME"
    step "Making a virtual environment in $VENV (Python $(python_version "$PY"))"
    # What these scripts didn't make isn't theirs to empty.
    if [ -d "$VENV" ] && [ ! -e "$VENV/.root" ] && [ ! -e "$VENV/.installing" ] && [ -n "$(ls -A "$VENV")" ]; then
        fail "$VENV exists and was not made by these scripts; move it away, or name another place:" \
            "VENV=\$HOME/gateway-venv $NAME"
    fi
    mkdir -p "$VENV"
    : >"$VENV/.installing"
    find "$VENV" -mindepth 1 ! -path "$VENV/.installing" -delete # not venv --clear, which takes the marker first
    "$PY" -m venv "$VENV" 2>"$VENV/.venv-errors" || {
        cat "$VENV/.venv-errors" >&2
        fail "the virtual environment couldn't be made (above: why)."
    }
    rm -f "$VENV/.venv-errors"
    printf '%s\n' "$ROOT" >"$VENV/.root"
}

install_group() { # GROUP
    case "$1" in
        base)
            check_space 100
            make_venv
            step "Installing the gateway's libraries (about 10 MB to download)"
            ;;
        demo)
            check_processor
            is_set_up base || install_group base
            check_space 500
            step "Installing the engine, llama.cpp (34 MB to download), its model, SmolLM2-135M-Instruct (93 MB), and the openai client"
            ;;
        otel)
            is_set_up base || install_group base
            check_space 100
            step "Installing OpenTelemetry (about 2 MB to download)"
            ;;
        bench)
            is_set_up base || install_group base
            check_space 200
            step "Installing the bench's loop and the proxies it compares with (about 10 MB to download)"
            ;;
        dev)
            is_set_up base || install_group base
            check_space 300
            step "Installing what the tests and checks need (about 40 MB to download)"
            ;;
    esac
    : >"$VENV/.installing"
    awk -v part="# ==== $1:" '/^# ====/ { on = index($0, part) == 1 } on' "$ROOT/constraints.txt" >"$VENV/.part"
    # Every pin is a hash of a ready-made wheel: nothing is compiled, and nothing is resolved.
    local quiet=(-q)
    if [ "$1" = demo ] && [ -t 1 ]; then quiet=(); fi # few packages, and large ones: let pip show its bars
    run_pip ${quiet[@]+"${quiet[@]}"} --no-deps --only-binary :all: --require-hashes -r "$VENV/.part"
    if [ "$1" = base ]; then run_pip --quiet --no-deps --no-build-isolation --no-index -e "$ROOT"; fi
    rm -f "$VENV/.installing" "$VENV/.part"
    printf '%s\n' "$DIGEST" >"$VENV/.stamp-$1"
}

check_processor() { # before 127 MB are downloaded for nothing
    find_python
    "$PY" "$ROOT/gateway/demo/checks.py" || exit 1
}

help_if_asked() { # "$@": with --help, shows what stands at the top of the script, and ends
    case "${1:-}" in -h | --help) ;; *) return ;; esac
    sed -n '2,/^[^#]/ { /^#/ { s/^# \{0,1\}//; p } }' "$0"
    exit 0
}

tick() { # a dot every two seconds while a quiet step runs
    while sleep 2 && kill -0 $$ 2>/dev/null; do printf .; done
}

run_pip() { # [-q] ARGUMENTS…: pip's progress goes to the terminal; so do its errors, and are then put into our words
    local errors ticker="" status=0
    errors="$(mktemp)" || fail "no temporary file can be made in ${TMPDIR:-/tmp}."
    if [ "$1" = -q ]; then
        tick 9<&- & # without the lock
        ticker=$!
    fi
    "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --retries 2 "$@" \
        2> >(trap '' INT; tee "$errors" | grep -v 'is ignored: it is neither' >&2) || status=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\n'
    fi
    if [ "$status" -eq 0 ]; then
        rm -f "$errors"
        return
    fi
    sleep 0.2 # tee
    trap "rm -f '$errors'" EXIT
    if grep -q 'cancelled by user' "$errors"; then
        say "Stopped. What has arrived is kept: the next start goes on from there."
        exit 130
    elif grep -qi 'no space left' "$errors"; then
        fail "the disk is full." "Make room (pip also needs some in ${TMPDIR:-/tmp}) and run it again."
    elif grep -qi 'read-only file system\|permission denied' "$errors"; then
        fail "nothing can be written to $VENV." "Name another place for the environment: VENV=\$HOME/gateway-venv $NAME"
    elif grep -qi 'connection\|name resolution\|timed out\|network is unreachable\|could not fetch' "$errors"; then
        fail "the packages couldn't be downloaded: no network, or pip doesn't know the proxy or mirror it has to use." \
            "pip's own settings count (pip config list). Run it again when the network is back; what has arrived is kept."
    elif grep -qi 'from versions: \|no matching distribution' "$errors"; then
        fail "a package isn't to be had for this machine ($(uname -sm), Python $("$VENV/bin/python" -V 2>&1))." \
            "If it is the engine (xllamacpp): the gateway itself runs, on an engine of your own: scripts/run --config mine.toml" \
            "If pip can't reach its index at all it says the same; then it is the network."
    else
        fail "the installation failed (above: pip's own words)."
    fi
}
